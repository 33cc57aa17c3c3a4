"""Embedding and head cut by their words, the tokens of the vocabulary: each rank looks up and scores its own
words (Shoeybi et al. 2019, section 3). The scores are not sent; the loss needs three numbers for each token
from each rank.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from .model import ToyTransformer
from .tensor import copy_to_tp, reduce_from_tp


class OwnWords(nn.Module):
    """Rows `first` to `first + len(weight)` of an embedding. The words of other ranks give zeros, so the sum
    over the ranks is the whole lookup.
    """

    def __init__(self, weight: nn.Parameter, first: int, group):
        super().__init__()
        self.weight, self.first, self.group = weight, first, group

    def forward(self, tokens):
        """Token ids (b, s) -> (b, s, h), the same on every rank."""
        place = tokens - self.first
        mine = (place >= 0) & (place < len(self.weight))
        return reduce_from_tp(self.weight[place * mine] * mine.unsqueeze(-1), self.group)


def split_vocabulary(model: ToyTransformer, group=None) -> ToyTransformer:
    """Keep this rank's words of embedding and head. The model is changed in place and returned; its scores
    are (b, s, words of this rank). Raises ValueError if the group's size does not divide the vocabulary.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    embedding, head = model[0], model[-1]
    words = embedding.token.num_embeddings
    if words % size:
        raise ValueError(
            f"{words} words do not divide by {size} ranks; use a number of ranks that divides {words}"
        )
    cut = lambda weight: nn.Parameter(weight.data.chunk(size)[rank].clone(), weight.requires_grad)
    embedding.token = OwnWords(cut(embedding.token.weight), rank * words // size, group)
    head.score.weight = embedding.token.weight if model.tied else cut(head.score.weight)
    head.score.register_forward_pre_hook(lambda _, args: (copy_to_tp(args[0], group),))
    return model


def split_loss(scores, targets, group=None):
    """`loss_of`, when each rank has the scores of its words only. scores (b, s, V/t), targets (b, s)."""
    largest = scores.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    exponentials = reduce_from_tp((scores - largest.unsqueeze(-1)).exp().sum(-1), group)
    place = targets - dist.get_rank(group) * scores.shape[-1]
    mine = (place >= 0) & (place < scores.shape[-1])
    of_target = scores.gather(-1, (place * mine).unsqueeze(-1)).squeeze(-1) * mine
    return (exponentials.log() + largest - reduce_from_tp(of_target, group)).mean()


def vocabulary_parallel_step(model: ToyTransformer, tokens, targets, group=None) -> float:
    """`twin_step` of a model under `split_vocabulary`."""
    loss = split_loss(model(tokens), targets, group)
    loss.backward()
    return loss.item()
