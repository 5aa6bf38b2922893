"""The ops of this package, by folder."""

OPS = (
    "page_summary",
    "page_score",
    "page_select",
    "paged_attention",
    "merge_lse",
    "block_sparse_prefill",
    "ragged_attention",
    "markov_step",
    "rejection_sampling",
)
