"""What a run is trained on: bytes of a text, or tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from three_axes.files import find

from .config import Config

SAMPLE = 1 << 20  # of more tokens than so many, so many are looked at


def read_text(file: str = "") -> torch.Tensor:
    """All bytes of a text file, or of the prose of drops 01 to 13: (length,), numbers 0 to 255.

    Raises ValueError.
    """
    try:
        if file:
            text = Path(file).read_bytes()
        else:
            books = [
                json.loads(p.read_text(encoding="utf-8"))
                for p in sorted(find("notebooks").glob("[01]*.ipynb"))
                if p.name < "14"
            ]
            text = "\n\n".join(
                "".join(c["source"]) for b in books for c in b["cells"] if c["cell_type"] == "markdown"
            ).encode()
    except OSError as e:
        raise ValueError(
            f"the text {file or 'of the drops'} cannot be read ({e.strerror or e}); give a file with --text"
        ) from None
    return (
        torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        if text
        else torch.zeros(0, dtype=torch.long)
    )


def read_tokens(folder: str, vocabulary: int) -> torch.Tensor:
    """All tokens of a folder's *.bin, by name, as tokenizers' scripts write them: plain numbers of 2 bytes,
    or of 4. One file is not read into memory as a whole. Raises ValueError.
    """
    kind = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    files = sorted(Path(folder).glob("*.bin"))
    if not files:
        raise ValueError(f"{folder} has no *.bin with tokens")
    parts = [np.memmap(file, kind, "c") for file in files if file.stat().st_size]
    tokens = torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts or [np.zeros(0, kind)]))
    if len(tokens) and (most := int(tokens[:: 1 + len(tokens) // SAMPLE].long().max())) >= vocabulary:
        raise ValueError(f"{folder} has a token {most}; the model knows {vocabulary}: raise --vocabulary")
    return tokens


def batch_of(text: torch.Tensor, step: int, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets), each (batch, seq_len): the whole batch of a step, the same for every layout."""
    if len(text) < config.seq_len + 2:
        raise ValueError(
            f"the text has {len(text)} tokens; sequences of {config.seq_len} need at least"
            f" {config.seq_len + 2}"
        )
    chance = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - config.seq_len, (config.batch, 1), generator=chance)
    at = starts + torch.arange(config.seq_len)
    return text[at].long(), text[at + 1].long()
