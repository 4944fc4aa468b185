"""What vLLM says by itself: ``PYTHON plain.py FILE``, with an object of directories, arguments and prompts; prints the
greedy tokens of each."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads(Path(sys.argv[1]).read_text())
    said = {}
    for directory, arguments in asked["models"].items():
        llm = LLM(directory, skip_tokenizer_init=True, generation_config="vllm", **arguments)
        how = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in asked["prompts"]], how, use_tqdm=False)
        said[directory] = [list(output.outputs[0].token_ids) for output in outputs]
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    sys.stdout.write("\n" + json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
