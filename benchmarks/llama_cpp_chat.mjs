// What a model answers in llama.cpp with its own chat template, greedily: MODEL.gguf QUESTION TOKENS, as text.

import { getLlama, LlamaChatSession } from "node-llama-cpp";

const [path, question, tokens] = process.argv.slice(2);
const llama = await getLlama({ gpu: false, build: "never", logLevel: "error" });
const model = await llama.loadModel({ modelPath: path });
const context = await model.createContext({ contextSize: 1024 });
const session = new LlamaChatSession({ contextSequence: context.getSequence() });
console.log(await session.prompt(question, { temperature: 0, maxTokens: Number(tokens) }));
process.exit(0);
