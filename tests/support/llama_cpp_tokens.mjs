// The tokens that llama.cpp makes of texts: TEXTS.json MODEL.gguf..., as JSON, a line for each model.

import { readFileSync } from "node:fs";
import { getLlama } from "node-llama-cpp";

const [texts, ...paths] = process.argv.slice(2);
const given = JSON.parse(readFileSync(texts, "utf8"));
const llama = await getLlama({ gpu: false, build: "never", maxThreads: 1, logLevel: "error" });
for (const path of paths) {
    const model = await llama.loadModel({ modelPath: path, vocabOnly: true });
    console.log(JSON.stringify(given.map((text) => model.tokenize(text))));
    await model.dispose();
}
process.exit(0);
