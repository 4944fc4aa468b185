"""Run by vLLM's own interpreter: ``PYTHON process.py CHECKPOINT`` loads it from disk, and says one token."""

from __future__ import annotations

import sys

PROMPT = list(range(10, 26))


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], skip_tokenizer_init=True, generation_config="vllm", enforce_eager=True, max_model_len=512)
    how = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], how, use_tqdm=False)
    sys.stdout.write(f"{answer.outputs[0].token_ids[0]}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
