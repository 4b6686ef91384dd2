"""Times dispatch and combine of the transports over the devices that are here, one JSON line for each, and warns of a slow link.

    python tools/bench_dispatch.py                                            # all GPUs, the shape of an 8-layer Olmo benchmark
    python tools/bench_dispatch.py --transports ragged ring --tokens 16384
    JAX_PLATFORMS=cpu python tools/bench_dispatch.py --cpu-devices 4 --tokens 256 --embed-dim 64      # shows that it works, no more

Rates are of rows that have to leave a rank, in one direction. `equal` compares with the first transport's bits: on a new machine
or driver, run this before a training run.
"""

import argparse
import json
import sys

from moejax.config import MeshConfig
from moejax.errors import ConfigError
from moejax.parallel.expert.transports import TRANSPORTS
from moejax.parallel.flags import set_cpu_devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=list(TRANSPORTS),
        help="others are compared with the first (default: all that run here)",
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank (default: %(default)s)")
    parser.add_argument("--embed-dim", type=int, default=4096, help="default: %(default)s")
    parser.add_argument("--top-k", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--experts", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")
    parser.add_argument("--cpu-devices", type=int, default=4, help="fake devices where there is no GPU (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="interleaved rounds, of which the median counts (default: %(default)s)")
    args = parser.parse_args()
    for name in ("tokens", "embed_dim", "top_k", "experts", "cpu_devices", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is below 1")
    set_cpu_devices(args.cpu_devices)

    import jax

    from moejax.parallel import make_mesh
    from moejax.parallel.expert.bench import Case, measure, slow_link
    from moejax.plan.gpus import link_rate

    mesh = make_mesh(MeshConfig(ep=len(jax.devices())))
    runs_here = [name for name, transport in TRANSPORTS.items() if transport.refusal(jax.default_backend(), mesh.size) is None]
    case = Case(args.tokens, args.embed_dim, args.top_k, args.experts, args.dtype)
    link = link_rate(jax.devices()[0].device_kind, hosts=jax.process_count())
    try:
        lines = list(measure(case, args.transports or runs_here, mesh, link=link, repeats=args.repeats))
    except (ConfigError, ValueError) as refusal:
        parser.error(str(refusal))
    for line in lines:
        print(json.dumps({key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in line.items()}), flush=True)
        if (warning := slow_link(line)) is not None:
            print(f"warning: {warning}", file=sys.stderr)


if __name__ == "__main__":
    main()
