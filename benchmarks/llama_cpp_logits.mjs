// What llama.cpp predicts after each token of windows, or each STEP-th: MODEL.gguf WINDOWS.json OUT [STEP], which gets the
// logits as float32.

import { openSync, readFileSync, writeSync } from "node:fs";
import { getLlama } from "node-llama-cpp";

const [path, windows, out, step = 1] = process.argv.slice(2);
const texts = JSON.parse(readFileSync(windows, "utf8"));
const llama = await getLlama({ gpu: false, build: "never", logLevel: "error" });
const model = await llama.loadModel({ modelPath: path });
const context = await model.createContext({ contextSize: texts[0].length + 8 });
const sequence = context.getSequence(), file = openSync(out, "w");
for (const tokens of texts) {
    await sequence.clearHistory();
    const asked = await sequence.controlledEvaluate(
        tokens.map((token, i) => ((i + 1) % step ? token : [token, { generateNext: { logits: true } }])));
    for (const { next } of asked.filter((each) => each))
        writeSync(file, Float32Array.from({ length: next.logits.size }, (_, i) => next.logits.get(i)));
}
process.exit(0);
