"""One rank's part of Llama 3 8B with its optimizer's state: the sizes of ``--shape llama3-8b``.

As in the checkpoint workload ``llama3-8b`` of MLPerf Storage: 8 ranks, of which each has an eighth
of the rows of every parameter, 2 bytes of model and 12 of optimizer for each element. Rows stay as
they are; columns are scaled.
"""

from __future__ import annotations

RANKS = 8
LAYERS = 32
ELEMENT_NBYTES = 2 + 3 * 4
"""A parameter in bfloat16; in float32 the optimizer's copy of it and two moments."""
_VOCABULARY, _HIDDEN, _FORWARD, _KEYS = 128256, 4096, 14336, 1024
_LAYER = {
    "self_attn.q_proj": (_HIDDEN, _HIDDEN),
    "self_attn.k_proj": (_KEYS, _HIDDEN),
    "self_attn.v_proj": (_KEYS, _HIDDEN),
    "self_attn.o_proj": (_HIDDEN, _HIDDEN),
    "mlp.gate_proj": (_FORWARD, _HIDDEN),
    "mlp.up_proj": (_FORWARD, _HIDDEN),
    "mlp.down_proj": (_HIDDEN, _FORWARD),
    "input_layernorm": (_HIDDEN,),
    "post_attention_layernorm": (_HIDDEN,),
}
PARAMETERS: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (_VOCABULARY, _HIDDEN),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(LAYERS)
        for name, shape in _LAYER.items()
    },
    "model.norm.weight": (_HIDDEN,),
    "lm_head.weight": (_VOCABULARY, _HIDDEN),
}


def sizes_for(nbytes: int) -> dict[str, tuple[int, ...]]:
    """By name, the sizes of one rank's parts whose training state has at most this many bytes.

    Every matrix keeps a column at least: 4 MB in all.
    """
    vectors = sum(shape[0] for shape in PARAMETERS.values() if len(shape) == 1)
    matrices = sum(shape[0] * shape[1] for shape in PARAMETERS.values() if len(shape) == 2)
    wanted = nbytes * RANKS // ELEMENT_NBYTES - vectors
    return {
        name: (rows // RANKS, *(max(1, each * wanted // matrices) for each in columns))
        for name, (rows, *columns) in PARAMETERS.items()
    }
