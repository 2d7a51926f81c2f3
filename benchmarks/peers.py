r"""What another runtime takes for a prompt and for each token after it: one turn, as JSON, for runtimes.py.

    python -m venv PEERS && PEERS/bin/pip install ik-llama-cpp-python openvino-genai onnxruntime-genai \
        onnx onnx-ir torch==2.13.0 transformers
    PEERS/bin/python benchmarks/peers.py RUNTIME MODEL PROMPT TOKENS THREADS

It runs in an environment that has these runtimes, which need not have niwaki. MODEL is a GGUF file, or for onnxruntime
what its model builder made. The greedy choice of the next token is part of a token's time, as in llama_cpp.mjs, and the
end of a text is a token like any other.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator

#: Seconds to the first token, and for each of the others, of a number of tokens after a prompt of some.
Turn = Callable[[list[int], int], tuple[float, float]]


def timed(steps: Iterator[object], tokens: int) -> tuple[float, float]:
    """The times of a turn in which each of ``steps`` makes a token."""
    began = time.perf_counter()
    next(steps)
    middle = time.perf_counter()
    for _ in range(tokens - 1):
        next(steps)
    return middle - began, (time.perf_counter() - middle) / (tokens - 1)


def ik_llama_cpp(path: str, positions: int, threads: int) -> Turn:
    """ik_llama.cpp, by the inner parts of its package, which time no Python but the choice of a token."""
    import numpy as np
    from ik_llama_cpp import _ctypes_api as api
    from ik_llama_cpp._internals import IkContext, IkModel, make_batch_range

    model = IkModel(path)
    context = IkContext(model, n_ctx=-(-positions // 256) * 256, n_threads=threads)

    def steps(given: list[int]) -> Iterator[object]:
        context.kv_cache_clear()
        at = 0
        while True:
            batch = make_batch_range(given, pos_start=at)
            if context.decode(batch):
                raise RuntimeError("ik_llama.cpp did not compute the tokens")
            api.llama_batch_free(batch)
            at += len(given)
            given = [int(np.ctypeslib.as_array(context.get_logits(-1), (model.n_vocab,)).argmax())]
            yield given

    return lambda given, tokens: timed(steps(given), tokens)


def openvino(path: str, positions: int, threads: int) -> Turn:
    """OpenVINO, which makes a model of a GGUF file's."""
    import numpy as np
    import openvino_genai as genai
    from openvino import Tensor

    pipeline = genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)

    def turn(given: list[int], tokens: int) -> tuple[float, float]:
        config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        ids = np.array([given], dtype=np.int64)
        found = pipeline.generate(genai.TokenizedInputs(Tensor(ids), Tensor(np.ones_like(ids))), config)
        took = found.perf_metrics
        if (took.get_num_input_tokens(), took.get_num_generated_tokens()) != (len(given), tokens):
            raise RuntimeError("openvino counts other tokens")
        return took.get_ttft().mean / 1000, took.get_tpot().mean / 1000

    return turn


def onnxruntime(path: str, positions: int, threads: int) -> Turn:
    """ONNX Runtime, on a directory of its model builder's."""
    import onnxruntime_genai as genai

    config = genai.Config(path)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = genai.Model(config)

    def steps(given: list[int]) -> Iterator[object]:
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(max_length=positions, min_length=positions, do_sample=False)
        generator = genai.Generator(model, parameters)
        generator.append_tokens(given)
        while True:
            yield generator.generate_next_token()

    return lambda given, tokens: timed(steps(given), tokens)


RUNTIMES = {"ik_llama.cpp": ik_llama_cpp, "openvino": openvino, "onnxruntime": onnxruntime}


def main() -> None:
    """One turn of what the command line names."""
    runtime, path, *numbers = sys.argv[1:]
    prompt, tokens, threads = map(int, numbers)
    turn = RUNTIMES[runtime](path, prompt + tokens, threads)
    given = [(i * 7919 + 13) % 20000 + 100 for i in range(prompt)]  # as in llama_cpp.mjs
    turn(given[::-1], tokens)  # to warm up, with a prompt that nothing can be kept of
    first, rest = turn(given, tokens)
    print(json.dumps({"first": [first], "rest": [rest]}))


if __name__ == "__main__":
    main()
