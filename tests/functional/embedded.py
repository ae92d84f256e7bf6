"""The embedded model in a folder of its own, as a user's model would be."""

OF_THE_EMBEDDED = (
    "policy.max_total_sequence_length=32",
    "generation.max_new_tokens=8",
    "policy.megatron_cfg.optimizer.lr=3e-4",
)
"""The defaults that follow from the embedded model's name, and that its folder so does not have."""
