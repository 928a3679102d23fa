"""DraftConfig: the shape of a DFlash drafter, and a check that it fits its target; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blockdraft.cache.spec import LayerSpec, Newest
from blockdraft.errors import ModelError
from blockdraft.models.config import ModelConfig, Rope, layer_spec

DraftKind = Literal["dflash", "dflash2", "dspark", "xpress", "domino", "lilicorr"]
TREE_KINDS: tuple[DraftKind, ...] = ("dflash", "dflash2", "dspark")  # their scores need no chosen drafts
KIND_NAMES: dict[DraftKind, str] = {
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "xpress": "XPress",
    "domino": "Domino",
    "lilicorr": "LiLiCorr",
}
SPARK_CANDIDATES = 32  # arbitrary: DSpark has no limit, vLLM's examples use 16
DOMINO_CANDIDATES = 512  # arbitrary: Domino has no limit, SGLang takes 2,048 for all columns of a block


@dataclass(frozen=True, slots=True)
class Dflash2Head:
    """The options of DFlash2 (models/dflash.py)."""

    conv_taps: int
    conv_group: int  # channels that share a token's change of the kernel
    rank: int  # length of the vectors whose products are pair scores; 0: convolutions alone
    top_k: int  # candidates per column
    skips_first: bool = False  # the first draft has no pair score: its column reads the anchor


@dataclass(frozen=True, slots=True)
class XPressHead:
    """The options of XPress (models/draft_heads.py)."""

    rank: int  # size of a column's latent
    inner_size: int
    num_passes: int  # how often the drafts are chosen again
    top_k: int  # candidates per column; 0: all tokens


@dataclass(frozen=True, slots=True)
class DominoHead:
    """The options of Domino (models/draft_heads.py)."""

    state_size: int  # of the recurrent layer that reads the drafts
    rank: int  # size of a draft's latent
    num_plain: int  # first drafts that the head leaves alone


@dataclass(frozen=True, slots=True)
class LiLiCorrHead:
    """The options of LiLiCorr (models/lattice.py)."""

    top_k: int  # candidates per column
    size: int
    num_layers: int
    num_heads: int
    mlp_ratio: float
    factor_size: int  # length of the vectors whose products are pair scores
    eps: float  # least length of these vectors before they are normalised
    scale: float  # of pair scores


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """The shape of a drafter."""

    name: str
    block: int  # anchor included
    mask_token_id: int
    taps: tuple[int, ...]
    vocab_size: int  # the target's
    draft_vocab_size: int  # rows of the drafter's own head; may be smaller
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]  # per layer
    is_causal: tuple[bool, ...]  # per layer, inside the block
    has_anchored_window: bool  # the window is measured from the anchor, not the query
    embedding_scale: float | None  # None: the target's
    logit_scale: float
    logit_softcap: float | None  # None: none, also where the target has one
    target_hidden_size: int
    num_target_layers: int | None
    has_bias: bool = False  # on queries, keys, values and the attention's output
    dflash2: Dflash2Head | None = None
    drafts_from_anchor: bool = False  # each column, also the anchor's, predicts the token after it
    copies_head: bool = False  # the file's head is a frozen copy of the target's
    markov_rank: int = 0  # rank of DSpark's Markov head; 0 without one
    xpress: XPressHead | None = None
    domino: DominoHead | None = None
    lilicorr: LiLiCorrHead | None = None
    unread_keys: tuple[str, ...] = ()  # of config.json, with their sections: nothing here knows them

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def kind(self) -> DraftKind:
        """The kind according to the options; the file's name for it is ignored."""
        if self.lilicorr is not None:
            return "lilicorr"
        if self.dflash2 is not None:
            return "dflash2"
        if self.domino is not None:
            return "domino"
        return "xpress" if self.xpress is not None else "dspark" if self.markov_rank else "dflash"

    @property
    def num_candidates(self) -> int:
        """The number of candidates per column, for drafts whose choice depends on the tokens before."""
        head = self.dflash2 or self.xpress
        top_k = DOMINO_CANDIDATES if self.domino is not None else SPARK_CANDIDATES
        top_k = top_k if head is None else head.top_k
        return min(top_k or self.draft_vocab_size, self.draft_vocab_size)

    @property
    def first_column(self) -> int:
        """The first column that predicts a draft in a forward."""
        return 0 if self.drafts_from_anchor else 1

    @property
    def num_columns(self) -> int:
        """The number of columns in the forward of a whole block.

        Domino's last column, trained but never drafted from by others, belongs to the block.
        """
        return self.block if self.domino is not None else self.first_column + self.block - 1

    def has_own_head(self, *, is_stored: bool) -> bool:
        """Return True if the drafter uses its own head; `is_stored` says if the file has one.

        A LiLiCorr file that says it has one must have it.
        """
        if self.lilicorr is not None and not self.copies_head:
            return True
        return is_stored and not (self.copies_head and self.draft_vocab_size == self.vocab_size)

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """The layers, and for LiLiCorr one for context vectors, one half as keys, the other as values."""
        specs = tuple(layer_spec(self.num_kv_heads, self.head_dim, window) for window in self.windows)
        if self.lilicorr is None:
            return specs
        return *specs, Newest(-(-self.hidden_size // (2 * self.head_dim)), self.head_dim)


def check_pair(draft: DraftConfig, target: ModelConfig, eos_ids: tuple[int, ...]) -> None:
    """Raise ModelError if the drafter does not fit the target."""

    def mismatch(what: str) -> ModelError:
        return ModelError(
            f"draft '{draft.name}' {what}: the pair does not match '{target.name}'. See docs/models.md."
        )

    if draft.target_hidden_size != target.hidden_size or draft.hidden_size != target.hidden_size:
        raise mismatch(
            f"has hidden size {draft.hidden_size} and reads features of {draft.target_hidden_size}, "
            f"but the target has {target.hidden_size}"
        )
    if draft.num_target_layers not in (None, target.num_layers):
        raise mismatch(f"is for a target of {draft.num_target_layers} layers, but it has {target.num_layers}")
    if draft.taps and max(draft.taps) >= target.num_layers:
        raise mismatch(f"reads layer {max(draft.taps)}, but the target has {target.num_layers} layers")
    if draft.vocab_size != target.vocab_size:
        raise mismatch(f"has vocabulary {draft.vocab_size}, but the target has {target.vocab_size}")
    if not 0 <= draft.mask_token_id < target.vocab_size:
        raise mismatch(f"masks with token {draft.mask_token_id}, outside {target.vocab_size} tokens")
    if draft.mask_token_id in eos_ids:
        raise mismatch(f"masks with token {draft.mask_token_id}, which ends the target's text")
