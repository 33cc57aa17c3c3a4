"""Record the incidents of drop 10 anew, from real ranks: python data/incidents/make.py"""

import json
from dataclasses import asdict
from pathlib import Path

from drops import d10

ORDER = ("long batch", "gather on rank 0", "optimizer state", "leak")  # of run_1 to run_4

if __name__ == "__main__":
    for number, cause in enumerate(ORDER, 1):
        file = Path(__file__).parent / f"run_{number}.json"
        file.write_text(json.dumps(asdict(d10.crash(cause)), indent=1) + "\n")
        print(file.name)
    for name, lengths in (("varied", d10.VARIED), ("same", d10.SAME)):
        file = Path(__file__).parent / f"fragmented_{name}.json"
        file.write_text(json.dumps(asdict(d10.fragment(lengths))) + "\n")
        print(file.name)
