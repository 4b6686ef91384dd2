"""Times the whole training step of a small model on one device, one JSON line: speed, compile time, and shares of what the machine can do.

    python tools/bench_step.py --experts 16
    python tools/bench_step.py --experts 128 --dtype float32 --steps 20 --batch 4 --seq 128 --vocab 2048

Step, optimizer, a dense product and a memory copy run in turn, and medians count; moejax/train/bench.py says what is in the line.
"""

import argparse
import json

from moejax.train.bench import Shape, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=16, help="of each layer (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of compute (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=11, help="rounds, of which the median counts (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=2048, help="default: %(default)s")
    args = parser.parse_args()
    for name in ("experts", "steps", "batch", "seq", "vocab"):
        least = 4 if name == "experts" else 1
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)} is below {least}")
    line = measure(Shape(experts=args.experts, dtype=args.dtype, batch=args.batch, seq=args.seq, vocab=args.vocab), args.steps)
    print(json.dumps({key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in line.items()}))


if __name__ == "__main__":
    main()
