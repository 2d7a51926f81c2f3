"""What config.json says in the models that people use most: their real numbers, for guards against bad input."""

from __future__ import annotations

from typing import Any


def _of(kind: str, named: str, vocabulary: int, width: int, neurons: int, depth: int, heads: int, **others: Any) -> Any:
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": neurons, "num_hidden_layers": depth}
    return {"model_type": kind, "architectures": [named], "num_attention_heads": heads, **sizes, **others}


def _decoder(kind: str, *sizes: int, grouped: int = 0, positions: int = 32768, **others: Any) -> Any:
    named = f"{''.join(part.title() for part in kind.removesuffix('_text').split('_'))}ForCausalLM"
    others = {"num_key_value_heads": grouped or sizes[-1], "max_position_embeddings": positions, **others}
    return _of(kind, others.pop("named", named), *sizes, **others)


def _bert(kind: str, named: str, *sizes: int, **others: Any) -> Any:
    return _of(kind, named, *sizes, **{"max_position_embeddings": 512, "type_vocab_size": 2, **others})


_LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
_DEEPSEEK: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEEPSEEK |= {"moe_layer_freq": 1, "n_shared_experts": 2, "first_k_dense_replace": 1}
_DEEPSEEK |= {"moe_intermediate_size": 1408, "num_experts_per_tok": 6}
_DEEPSEEK_V3 = {**_DEEPSEEK, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4}
_DEEPSEEK_V3 |= {"q_lora_rank": 1536, "n_routed_experts": 256, "moe_intermediate_size": 2048, "num_experts_per_tok": 8}
_DEEPSEEK_V3 |= {"num_nextn_predict_layers": 1, "topk_method": "noaux_tc"}

#: By the name of a model.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": _decoder("llama", 128256, 2048, 8192, 16, 32, grouped=8, positions=131072)
    | {"rope_scaling": _LLAMA3, "rope_theta": 500000.0, "head_dim": 64, "tie_word_embeddings": True},
    "Llama-3.1-405B": _decoder("llama", 128256, 16384, 53248, 126, 128, grouped=8, positions=131072),
    "TinyLlama-1.1B": _decoder("llama", 32000, 2048, 5632, 22, 32, grouped=4, positions=2048),
    "SmolLM2-135M": _decoder("llama", 49152, 576, 1536, 30, 9, grouped=3, positions=8192, tie_word_embeddings=True),
    "SmolLM3-3B": _decoder(
        "smollm3", 128256, 2048, 11008, 36, 16, grouped=4, positions=65536, named="SmolLM3ForCausalLM"
    )
    | {"tie_word_embeddings": True},
    "Qwen2.5-0.5B": _decoder("qwen2", 151936, 896, 4864, 24, 14, grouped=2, max_window_layers=21, sliding_window=32768),
    "Qwen2.5-72B": _decoder("qwen2", 152064, 8192, 29568, 80, 64, grouped=8, max_window_layers=70),
    "Qwen2-57B-A14B": _decoder("qwen2_moe", 151936, 3584, 18944, 28, 28, grouped=4, named="Qwen2MoeForCausalLM")
    | {"shared_expert_intermediate_size": 20480, "moe_intermediate_size": 2560, "num_experts": 64}
    | {"num_experts_per_tok": 8, "decoder_sparse_step": 1},
    "Qwen3-0.6B": _decoder("qwen3", 151936, 1024, 3072, 28, 16, grouped=8, head_dim=128, tie_word_embeddings=True),
    "Qwen3-235B-A22B": _decoder("qwen3_moe", 151936, 4096, 12288, 94, 64, grouped=4)
    | {"head_dim": 128, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8}
    | {"max_window_layers": 94, "decoder_sparse_step": 1},
    "Qwen3.5-0.8B": _decoder(
        "qwen3_5_text", 248320, 1024, 3584, 24, 8, grouped=2, named="Qwen3_5ForCausalLM", positions=262144
    )
    | {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128}
    | {"linear_value_head_dim": 128, "tie_word_embeddings": True, "mtp_num_hidden_layers": 1},
    "gemma-2-2b": _decoder("gemma2", 256000, 2304, 9216, 26, 8, grouped=4, head_dim=256, sliding_window=4096),
    "gemma-3-270m": _decoder("gemma3_text", 262144, 640, 2048, 18, 4, grouped=1, head_dim=256, sliding_window=512),
    "gemma-3n-E4B": _decoder("gemma3n_text", 262400, 2048, 16384, 35, 8, grouped=2)
    | {"head_dim": 256, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256}
    | {"num_kv_shared_layers": 15, "laurel_rank": 64, "sliding_window": 512},
    "gemma-4-E2B": _decoder("gemma4_text", 262144, 1536, 6144, 35, 8, grouped=1, positions=131072)
    | {"head_dim": 256, "global_head_dim": 512, "vocab_size_per_layer_input": 262144}
    | {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20, "sliding_window": 512},
    "embeddinggemma-300m": _decoder(
        "gemma3_text", 262144, 768, 1152, 24, 3, grouped=1, named="Gemma3TextModel", positions=2048
    )
    | {"head_dim": 256, "sliding_window": 512, "use_bidirectional_attention": True},
    "Mistral-7B-v0.3": _decoder("mistral", 32768, 4096, 14336, 32, 32, grouped=8, sliding_window=None),
    "Mistral-Nemo": _decoder("mistral", 131072, 5120, 14336, 40, 32, grouped=8, positions=1024000, head_dim=128),
    "Mixtral-8x22B": _decoder("mixtral", 32768, 6144, 16384, 56, 48, grouped=8, positions=65536, num_local_experts=8),
    "Phi-3.5-mini": _decoder("phi3", 32064, 3072, 8192, 32, 32, sliding_window=262144, pad_token_id=32000),
    "phi-4": _decoder("phi3", 100352, 5120, 17920, 40, 40, grouped=10, positions=16384, pad_token_id=100349),
    "OLMo-2-7B": _decoder("olmo2", 100352, 4096, 11008, 32, 32, positions=4096),
    "granite-3.3-2b": _decoder("granite", 49159, 2048, 8192, 40, 32, grouped=8, positions=131072),
    "granite-4.0-h-tiny": _decoder(
        "granitemoehybrid", 100352, 1536, 512, 40, 12, grouped=4, positions=131072, named="GraniteMoeHybridForCausalLM"
    )
    | {"num_local_experts": 64, "num_experts_per_tok": 6, "shared_intermediate_size": 1024, "mamba_n_heads": 48}
    | {"mamba_d_head": 64, "mamba_d_state": 128, "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4},
    "LFM2-350M": _decoder("lfm2", 65536, 1024, 6656, 16, 16, grouped=8, positions=128000)
    | {"block_ff_dim": 6656, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10]},
    "GLM-4-9B-0414": _decoder("glm4", 151552, 4096, 13696, 40, 32, grouped=2, head_dim=128, pad_token_id=151329),
    "gpt-oss-120b": _decoder(
        "gpt_oss", 201088, 2880, 2880, 36, 64, grouped=8, named="GptOssForCausalLM", positions=131072
    )
    | {"head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128},
    "DeepSeek-V2-Lite": _decoder("deepseek_v2", 102400, 2048, 10944, 27, 16, positions=163840)
    | {**_DEEPSEEK, "q_lora_rank": None, "n_routed_experts": 64, "topk_method": "greedy"},
    "DeepSeek-V3": _decoder("deepseek_v3", 129280, 7168, 18432, 61, 128, positions=163840) | _DEEPSEEK_V3,
    "falcon-7b": _of("falcon", "FalconForCausalLM", 65024, 4544, 18176, 32, 71)
    | {"multi_query": True, "parallel_attn": True, "bias": False, "new_decoder_architecture": False},
    "starcoder2-3b": _decoder("starcoder2", 49152, 3072, 12288, 30, 24, grouped=2, sliding_window=4096),
    "c4ai-command-r7b": _decoder("cohere2", 256000, 4096, 14336, 32, 32, grouped=8, positions=132096),
    "opt-125m": _of("opt", "OPTForCausalLM", 50272, 768, 3072, 12, 12, ffn_dim=3072, max_position_embeddings=2048),
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_ctx": 1024, "n_embd": 768, "n_head": 12}
    | {"n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
    "Doge-20M": _decoder("doge", 32768, 256, 512, 8, 2, grouped=1, positions=2048)
    | {"num_experts": 16384, "num_experts_per_tok": 64, "is_moe": False},
    "bert-base-uncased": _bert("bert", "BertForMaskedLM", 30522, 768, 3072, 12, 12),
    "all-MiniLM-L6-v2": _bert("bert", "BertModel", 30522, 384, 1536, 6, 12),
    "ms-marco-MiniLM-L6-v2": _bert("bert", "BertForSequenceClassification", 30522, 384, 1536, 6, 12)
    | {"id2label": {"0": "LABEL_0"}},
    "bert-base-NER": _bert("bert", "BertForTokenClassification", 28996, 768, 3072, 12, 12, num_labels=9),
    "all-mpnet-base-v2": _bert("mpnet", "MPNetForMaskedLM", 30527, 768, 3072, 12, 12)
    | {"max_position_embeddings": 514, "pad_token_id": 1},
    "bge-m3": _bert("xlm-roberta", "XLMRobertaModel", 250002, 1024, 4096, 24, 16)
    | {"max_position_embeddings": 8194, "type_vocab_size": 1, "pad_token_id": 1},
    "distilbert-sst-2": {"model_type": "distilbert", "architectures": ["DistilBertForSequenceClassification"]}
    | {"dim": 768, "hidden_dim": 3072, "n_heads": 12, "n_layers": 6, "vocab_size": 30522}
    | {"max_position_embeddings": 512},
    "ModernBERT-base": _bert("modernbert", "ModernBertForMaskedLM", 50368, 768, 1152, 22, 12)
    | {"max_position_embeddings": 8192, "global_attn_every_n_layers": 3, "local_attention": 128, "pad_token_id": 50283}
    | {"bos_token_id": 50281, "eos_token_id": 50282, "cls_token_id": 50281, "sep_token_id": 50282},
    "deberta-v3-base-mnli": _bert("deberta-v2", "DebertaV2ForSequenceClassification", 128100, 768, 3072, 12, 12)
    | {"type_vocab_size": 0, "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm"}
    | {"share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
    "t5-small": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64}
    | {"d_model": 512, "num_heads": 8, "num_layers": 6, "vocab_size": 32128, "is_encoder_decoder": True}
    | {"decoder_start_token_id": 0, "n_positions": 512},
    "mt5-base": {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64}
    | {"d_model": 768, "num_heads": 12, "num_layers": 12, "vocab_size": 250112, "is_encoder_decoder": True}
    | {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0, "tie_word_embeddings": False},
}
