// What llama.cpp takes for a prompt and for each token after it: MODEL.gguf PROMPT TOKENS REPEATS THREADS, as JSON.

import { getLlama } from "node-llama-cpp";

const [path, ...numbers] = process.argv.slice(2);
const [prompt, tokens, repeats, threads] = numbers.map(Number);
const llama = await getLlama({ gpu: false, build: "never", maxThreads: threads, logLevel: "error" });
const model = await llama.loadModel({ modelPath: path });
const context = await model.createContext({ contextSize: prompt + tokens + 8, threads });
const sequence = context.getSequence();
const given = Array.from({ length: prompt }, (_, i) => (i * 7919 + 13) % 20000 + 100);
const seconds = () => Number(process.hrtime.bigint()) / 1e9;
const first = [], rest = [];
for (let turn = 0; turn <= repeats; ++turn) {
    await sequence.clearHistory();
    const began = seconds();
    let middle = null, written = 0;
    // The end of a text is a token like any other here: a different count of tokens would be a different measurement.
    for await (const _ of sequence.evaluate(given, { temperature: 0, yieldEogToken: true })) {
        middle ??= seconds();
        if (++written === tokens) break;
    }
    if (written < tokens) throw new Error(`it wrote ${written} tokens of ${tokens}`);
    if (turn) {  // once to warm up
        first.push(middle - began);
        rest.push((seconds() - middle) / (tokens - 1));
    }
}
console.log(JSON.stringify({ first, rest }));
process.exit(0);
