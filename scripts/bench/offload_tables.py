"""The settings that offload_policy.py measures, by table."""

LOGPROB = "policy.offload_optimizer_states_for_logprob=true"
OPTIMIZER, ACTIVATIONS = "policy.megatron_cfg.optimizer", "policy.megatron_cfg"
CPU_OPTIMIZER = f"{OPTIMIZER}.optimizer_cpu_offload=true"
OVERLAPPED = f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true"
# Setting -> bytes that offload/copies.py gives to the device at a time.
PIECES = {f"overlapped, pieces of {mib} MiB": mib << 20 for mib in (512, 128, 32)}


def modules(*names: str) -> list[str]:
    chosen = f"{ACTIVATIONS}.offload_modules=[{','.join(names)}]"
    return [f"{ACTIVATIONS}.fine_grained_activation_offloading=true", chosen]


def fraction(share: float, overlap: bool) -> list[str]:
    overlapped = f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d={str(overlap).lower()}"
    return [CPU_OPTIMIZER, f"{OPTIMIZER}.optimizer_offload_fraction={share}", overlapped]


# Table -> setting -> overrides; the first setting is the baseline of the others.
TABLES: dict[str, dict[str, list[str]]] = {
    "prepare": {
        "states stay": [],
        "states leave, page-locked": [LOGPROB],
        "states leave, page-locked, overlapped": [LOGPROB, "policy.overlap_offload=true"],
        "offload=pinned": ["offload=pinned"],
        "states leave, pageable": [LOGPROB, "policy.use_pinned_optimizer_offload=false"],
    },
    "pieces": {
        "states stay": [],
        "states leave, page-locked": [LOGPROB],
        **{name: [LOGPROB, "policy.overlap_offload=true"] for name in PIECES},
    },
    "activations": {
        "none": [],
        "core_attn, attn_proj": modules("core_attn", "attn_proj"),
        "mlp": modules("mlp"),
        "mlp, half of the layers": [*modules("mlp"), f"{ACTIVATIONS}.activation_offload_fraction=0.5"],
        "qkv_linear, core_attn, attn_proj, mlp": modules("qkv_linear", "core_attn", "attn_proj", "mlp"),
        "recomputed instead": [f"{ACTIVATIONS}.activation_checkpointing=true"],
        "CPU optimizer": [CPU_OPTIMIZER, OVERLAPPED],
        "CPU optimizer; mlp": [CPU_OPTIMIZER, OVERLAPPED, *modules("mlp")],
        "CPU optimizer; core_attn, attn_proj, mlp": [
            *(CPU_OPTIMIZER, OVERLAPPED),
            *modules("core_attn", "attn_proj", "mlp"),
        ],
    },
    "activations_of_experts": {
        "none": [],
        "core_attn, attn_proj": modules("core_attn", "attn_proj"),
        "expert_fc1": modules("expert_fc1"),
        "moe_act": modules("moe_act"),
        "expert_fc1, moe_act": modules("expert_fc1", "moe_act"),
        "mlp_norm, expert_fc1, moe_act, core_attn, attn_proj": modules(
            "mlp_norm", "expert_fc1", "moe_act", "core_attn", "attn_proj"
        ),
        "recomputed instead": [f"{ACTIVATIONS}.activation_checkpointing=true"],
    },
    "cpu_optimizer": {
        "on the GPU": [],
        "half, overlapped": fraction(0.5, overlap=True),
        "half": fraction(0.5, overlap=False),
        "all, overlapped": fraction(1.0, overlap=True),
        "all": fraction(1.0, overlap=False),
    },
}
