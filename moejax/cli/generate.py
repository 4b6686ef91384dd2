"""Continue a text with a trained model: moejax generate RUN --prompt TEXT [settings].

RUN is a run directory, or its name below runs/. The newest checkpoint is taken unless --step names another.

  moejax generate quickstart --prompt "ROMEO:"
  moejax generate quickstart --prompt "ROMEO:" "JULIET:" --num-samples 3 --temperature 0.5
  moejax generate quickstart --help          every setting
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moejax.cli.words import HOW_TO_SET, find_run, split_subject, warn_of_reference
from moejax.config import read_config
from moejax.config.check import at_least, check
from moejax.config.overrides import apply_overrides, print_help


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    prompt: tuple[str, ...] = ()
    """Text to continue; several texts are continued one after the other. Needed."""
    max_new_tokens: int = 200
    """Tokens to add to each prompt."""
    temperature: float = 0.8
    """Divides the logits: lower is more predictable, 0 always takes the likeliest token."""
    top_p: float = 0.95
    """Draw from the likeliest tokens that together have this probability. 1: from all."""
    seed: int = 0
    """Seed of the draws."""
    num_samples: int = 1
    """Continuations of each prompt."""
    step: int | None = None
    """Step of the checkpoint. None: the newest."""

    def __post_init__(self) -> None:
        at_least("max_new_tokens", self.max_new_tokens, 1)
        at_least("temperature", self.temperature, 0)
        check(0 < self.top_p <= 1, f"top_p={self.top_p} is not in (0, 1]; 0.95 is usual, 1 draws from all tokens")
        at_least("seed", self.seed, 0)
        at_least("num_samples", self.num_samples, 1)


def run(words: Sequence[str]) -> int:
    """Generate as the words say and print the texts."""
    name, changes, wants_help = split_subject(words, "a run", 'moejax generate quickstart --prompt "ROMEO:"')
    options = apply_overrides(GenerateOptions(), changes)
    if wants_help:
        print_help(options, prog=f"moejax generate {name}", description=f"Continue a text with the model of run {name}.\n\n{HOW_TO_SET}")
        return 0
    run_dir = find_run(name)
    check(bool(options.prompt), 'prompt is not given; say what to continue, as in --prompt "ROMEO:"')
    warn_of_reference(read_config(run_dir))
    from moejax.generate import run_generate

    texts = run_generate(
        run_dir,
        prompts=list(options.prompt),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        num_samples=options.num_samples,
        step=options.step,
    )
    for number, text in enumerate(texts, start=1):
        if len(texts) > 1:
            print(f"--- {number} of {len(texts)} ---")
        print(text)
    return 0
