"""Verifies a config in every way in which it can be run, or in all ways that have given settings; can be interrupted and goes on.

    python tools/matrix.py quickstart                                     # the full cross product: hours
    python tools/matrix.py quickstart --recompute none block --weights resident --transport auto gather
    python tools/matrix.py quickstart --num-devices 8 --shard 1/4         # of all meshes of eight devices every fourth case
    python tools/matrix.py quickstart -- --model.num-layers 9             # settings of the config stand after --

Each case is a JSON line in --out (runs/matrix.jsonl), with the digest of the model that it was made with; a case that is there is not run
again. At the end stands how many cases of each setting are equal to the reference. Exit code 1 if any is not.
"""

import argparse
import hashlib
import json
import math
import os
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

from moejax.cli.verify import FAST_COMPILES, as_dict
from moejax.cli.words import compute_on_cpu
from moejax.config import load_config, to_json
from moejax.errors import MoejaxError


def main() -> int:
    words, settings = sys.argv[1:], []
    if "--" in words:
        words, settings = words[: words.index("--")], words[words.index("--") + 1 :]
    compute_on_cpu()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILES}"
    from moejax.parallel.flags import set_cpu_devices
    from moejax.verify import DEVICES, Case, Verifier, all_cases, text

    names = [field.name for field in fields(Case)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="+", metavar="VALUE", help="only cases with one of these values")
    parser.add_argument("--num-devices", type=int, help="only meshes of that many devices")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="every N-th case, from the I-th on (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/matrix.jsonl"), help="default: %(default)s")
    args = parser.parse_args(words)
    index, count = _shard(parser, args.shard)
    set_cpu_devices(DEVICES)
    try:
        verifier = Verifier(load_config(args.config, settings))
    except MoejaxError as refusal:
        parser.error(str(refusal))
    cases = [case for case in all_cases(verifier.small) if _is_wanted(case.values, args, names)][index::count]
    if not cases:
        parser.error("no way of running this config has these settings; leave some of them out")
    digest = hashlib.sha256(f"{verifier.seed} {to_json(verifier.small)}".encode()).hexdigest()[:16]
    done = _done(args.out, digest)
    todo = [case for case in cases if _key(case.values) not in done]
    print("\n".join(text.heading(load_config(args.config, settings), verifier, len(cases))))
    print(f"{len(cases) - len(todo)} of them are in {args.out}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a", encoding="utf-8") as file:

        def report(outcome) -> None:
            record = as_dict(outcome) | {"digest": digest, "is_equal": not (outcome.differs or outcome.refusal)}
            done[_key(outcome.case.values)] = record["is_equal"]
            print(json.dumps(record), file=file, flush=True)
            print(text.line(outcome), flush=True)

        outcomes = verifier.run(todo, report)
    if todo:
        print("\n".join(text.verdict(outcomes)))
    results = [(case.values, done[_key(case.values)]) for case in cases]
    print("\n".join(_summary(results, names)))
    return 0 if all(is_equal for _, is_equal in results) else 1


def _shard(parser: argparse.ArgumentParser, word: str) -> tuple[int, int]:
    index, _, count = word.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        parser.error(f"--shard {word} is not I/N with 1 <= I <= N, such as 2/4")
    return int(index) - 1, int(count)


def _is_wanted(values: dict, args: argparse.Namespace, names: list[str]) -> bool:
    devices = math.prod(values[name] for name in ("pp", "dp", "ep"))
    chosen = {name: getattr(args, name) for name in names}
    return args.num_devices in (None, devices) and all(allowed is None or str(values[name]) in allowed for name, allowed in chosen.items())


def _key(values: dict) -> str:
    return json.dumps(values, sort_keys=True)


def _done(path: Path, digest: str) -> dict[str, bool]:
    """Cases of this model that the file holds; a line that was cut off by a kill counts for nothing."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["digest"] == digest:
            values = {name: value for name, value in record.items() if name not in ("errors", "signs", "refusal", "digest", "is_equal")}
            found[_key(values)] = record["is_equal"]
    return found


def _summary(results: list[tuple[dict, bool]], names: list[str]) -> list[str]:
    """Equal cases of all, for each value of each setting."""
    lines = ["", f"{sum(is_equal for _, is_equal in results)} of {len(results)} cases are equal to the reference; by setting:"]
    for name in names:
        cases = Counter(values[name] for values, _ in results)
        equal = Counter(values[name] for values, is_equal in results if is_equal)
        lines.append(f"  {name:<16}" + "  ".join(f"{value}: {equal[value]}/{cases[value]}" for value in sorted(cases, key=str)))
    return lines


if __name__ == "__main__":
    sys.exit(main())
