// What llama.cpp makes of files: QUESTIONS ANSWERS, two files of JSON; a question is {file, texts, tokens}.
// texts: to be split into tokens, special ones too; tokens: a sequence, of which the next token's logits are wanted
// at each place, as the base64 of float32.

import { readFileSync, writeFileSync } from "node:fs";
import { getLlama } from "node-llama-cpp";

const [questions, answers] = process.argv.slice(2);
const llama = await getLlama({ gpu: false, build: "never", maxThreads: 1, logLevel: "disabled" });

async function answer({ file, texts, tokens }) {
    const model = await llama.loadModel({ modelPath: file });
    const context = await model.createContext({ contextSize: 256, threads: 1 });
    const ask = { generateNext: { logits: true } };
    const made = await context.getSequence().controlledEvaluate(tokens.map((token) => [token, ask]));
    const logits = made.map(({ next }) => {
        const values = Float32Array.from({ length: next.logits.size }, (_, i) => next.logits.get(i));
        return Buffer.from(values.buffer).toString("base64");
    });
    const said = {
        split: texts.map((text) => model.tokenize(text, true)),
        logits,
        starts: model.tokens.shouldPrependBosToken ? [model.tokens.bos] : [],
        ends: model.tokens.shouldAppendEosToken ? [model.tokens.eos] : [],
        length: model.trainContextSize,
    };
    await context.dispose();
    await model.dispose();
    return said;
}

const found = [];
for (const question of JSON.parse(readFileSync(questions, "utf8")))
    found.push(await answer(question).catch((error) => ({ error: String(error) })));
writeFileSync(answers, JSON.stringify(found));
process.exit(0);
