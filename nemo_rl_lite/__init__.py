"""nemo_rl_lite: a launcher for GRPO, SFT and DPO on Ray, megatron-core and vLLM."""

__version__ = "0.1.0"
