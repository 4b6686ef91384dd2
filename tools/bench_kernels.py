"""Times kernels beside the least that their work can cost, one JSON line for each case, implementation and pass.

    python tools/bench_kernels.py                                   # the implementation that auto takes, float32, widths 256
    python tools/bench_kernels.py --experts 128 --patterns zipf --passes vjp
    python tools/bench_kernels.py --rows 65536 --widths 4096x2048 --experts 16 --dtype bfloat16

`ratio` is the time over that of one dense product of the same rows plus reading and writing the expert weights at the
measured copy rate: see moejax_kernels/grouped_matmul/bench.py. Everything of a case runs interleaved in one process.
"""

import argparse
import itertools
import json

from moejax_kernels.grouped_matmul.bench import PATTERNS, WEIGHT_PASSES, Case, measure


def widths(word: str) -> tuple[int, int]:
    k, _, n = word.partition("x")
    if not (k.isdigit() and n.isdigit()):
        raise argparse.ArgumentTypeError(f"{word} is not of the form KxN, such as 256x512")
    return positive(k), positive(n)


def positive(word: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word} is not a whole number of at least 1")
    return int(word)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=positive, nargs="+", default=[2048], help="real rows (default: %(default)s)")
    parser.add_argument("--widths", type=widths, nargs="+", default=[(256, 256)], metavar="KxN", help="of one expert (default: 256x256)")
    parser.add_argument("--experts", type=positive, nargs="+", default=[16, 128], help="default: %(default)s")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS), help="of the group sizes (default: all)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    parser.add_argument("--implementations", nargs="+", default=["auto"], help="default: the one that auto takes")
    parser.add_argument("--passes", nargs="+", choices=tuple(WEIGHT_PASSES), default=list(WEIGHT_PASSES), help="default: all")
    parser.add_argument(
        "--repeats", type=positive, default=15, help="interleaved rounds, of which the median counts (default: %(default)s)"
    )
    args = parser.parse_args()
    for rows, (k, n), experts, pattern in itertools.product(args.rows, args.widths, args.experts, args.patterns):
        case = Case(rows, k, n, experts, args.dtype, pattern)
        try:
            lines = measure(case, args.implementations, passes=args.passes, repeats=args.repeats)
        except (NotImplementedError, ValueError) as refusal:
            parser.error(str(refusal))
        for line in lines:
            print(json.dumps({key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in line.items()}), flush=True)


if __name__ == "__main__":
    main()
