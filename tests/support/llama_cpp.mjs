// The tokens of a text, and the likeliest ones that llama.cpp writes after it: MODEL.gguf TEXT COUNT, as JSON.

import { getLlama } from "node-llama-cpp";

const [path, text, count] = process.argv.slice(2);
const llama = await getLlama({ gpu: false, build: "never", maxThreads: 1, logLevel: "error" });
const model = await llama.loadModel({ modelPath: path });
const context = await model.createContext({ contextSize: 256, threads: 1 });
const given = model.tokenize(text), written = [];
for await (const token of context.getSequence().evaluate(given, { temperature: 0, yieldEogToken: true }))
    if (written.push(token) === Number(count)) break;
console.log(JSON.stringify({ given, written }));
process.exit(0);
