// What llama.cpp makes of files: from stdin [{file, texts, tokens}], to stdout one line of JSON for each.
// texts: to be split into tokens, special ones too; tokens: a sequence whose next-token logits are wanted at each place.

import { readFileSync } from "node:fs";
import { getLlama } from "node-llama-cpp";

const llama = await getLlama({ gpu: false, build: "never", maxThreads: 1, logLevel: "disabled" });
for (const { file, texts, tokens } of JSON.parse(readFileSync(0, "utf8"))) {
    let said;
    try {
        const model = await llama.loadModel({ modelPath: file, useMmap: false });
        const context = await model.createContext({ contextSize: 256, threads: 1 });
        const ask = { generateNext: { logits: true } };
        const made = await context.getSequence().controlledEvaluate(tokens.map((token) => [token, ask]));
        const logits = made.map((each) => Array.from({ length: each.next.logits.size }, (_, i) => each.next.logits.get(i)));
        const { bos, eos, shouldPrependBosToken, shouldAppendEosToken } = model.tokens;
        said = {
            split: texts.map((text) => model.tokenize(text, true)),
            logits, bos, eos, starts: shouldPrependBosToken, ends: shouldAppendEosToken,
            length: model.trainContextSize,
        };
        await context.dispose();
        await model.dispose();
    } catch (error) {
        said = { error: String(error) };
    }
    console.log(JSON.stringify(said));
}
process.exit(0);
