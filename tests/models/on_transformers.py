"""transformers: small models of text (tokens or embeddings cut along the sequence), of pictures and of series."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers as tf

from tests.models.cases import Case, image

BASE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**BASE, "vocab_size": 50, "max_position_embeddings": 64}
LLAMA = {**TEXT, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PICTURE = {**BASE, "image_size": 64, "patch_size": 16, "num_channels": 3}
DROP = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
STAGES = {"depths": [1, 1], "num_heads": [1, 2]}

#: By name: class, options of its configuration. Cut along the sequence.
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertModel", {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "Bert dropout": ("BertModel", {**TEXT, **DROP}),
    "Bert eager dropout": ("BertModel", {**TEXT, **DROP, "attn_implementation": "eager"}),
    "Roberta": ("RobertaModel", {**TEXT, **DROP, "pad_token_id": 1}),
    "Electra": ("ElectraModel", {**TEXT, "embedding_size": 16}),
    "DistilBert": ("DistilBertModel", {"vocab_size": 50, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 64}),
    "Deberta v2": ("DebertaV2Model", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "Albert": ("AlbertModel", {**TEXT, "embedding_size": 8}),
    "FNet": ("FNetModel", {k: v for k, v in TEXT.items() if k != "num_attention_heads"}),
    "Nystromformer": ("NystromformerModel", {**TEXT, "num_landmarks": 4, "segment_means_seq_len": 24}),
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": 50, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "GPTNeoX": ("GPTNeoXForCausalLM", {**TEXT}),
    "OPT": ("OPTModel", {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "max_position_embeddings": 64, "word_embed_proj_dim": 16}),
    "Bloom": ("BloomModel", {"vocab_size": 50, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "Llama": ("LlamaForCausalLM", LLAMA),
    "Mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 8}),
    "Qwen2": ("Qwen2ForCausalLM", LLAMA),
    "Qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}),
    "Gemma2": ("Gemma2ForCausalLM", {**LLAMA, "head_dim": 8, "sliding_window": 8}),
    "Phi": ("PhiForCausalLM", TEXT),
    "Mamba": ("MambaModel", {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
    "Mamba2": ("Mamba2Model", {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8}),
    "RWKV": ("RwkvModel", {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16}),
    "XLNet": ("XLNetModel", {"vocab_size": 50, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}),
    "ModernBert": ("ModernBertModel", {**TEXT, "local_attention": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}),
    "T5 encoder": ("T5EncoderModel", {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}),
}  # fmt: skip

PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViTModel", PICTURE),
    "ViT dropout": ("ViTModel", {**PICTURE, **DROP}),
    "ViT MAE": ("ViTMAEModel", {**PICTURE, "mask_ratio": 0.0}),
    "DeiT": ("DeiTModel", PICTURE),
    "BEiT": ("BeitModel", {**PICTURE, "use_relative_position_bias": True, "drop_path_rate": 0.0}),
    "DINOv2": ("Dinov2Model", PICTURE),
    "SigLIP": ("SiglipVisionModel", PICTURE),
    "CLIP vision": ("CLIPVisionModel", PICTURE),
    "Swin": ("SwinModel", {"image_size": 64, "patch_size": 4, "embed_dim": 8, "window_size": 4, **STAGES}),
    "Swin v2": ("Swinv2Model", {"image_size": 64, "patch_size": 4, "embed_dim": 8, "window_size": 4, **STAGES}),
    "Swin2SR": ("Swin2SRForImageSuperResolution", {"image_size": 32, "patch_size": 1, "embed_dim": 8, "window_size": 4, **STAGES}),
    "Donut Swin": ("DonutSwinModel", {"image_size": 64, "patch_size": 4, "embed_dim": 8, "window_size": 4, **STAGES}),
    "Segformer": ("SegformerForSemanticSegmentation", {"hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2], "depths": [1, 1, 1, 1], "decoder_hidden_size": 8}),
    "PVT": ("PvtModel", {"image_size": 64, "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2], "depths": [1, 1, 1, 1]}),
    "PVT v2": ("PvtV2Model", {"image_size": 64, "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2], "depths": [1, 1, 1, 1]}),
    "ConvNeXt": ("ConvNextModel", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}),
    "ConvNeXt v2": ("ConvNextV2Model", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}),
    "PoolFormer": ("PoolFormerModel", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}),
    "LeViT": ("LevitModel", {"image_size": 64, "hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [8, 8, 8]}),
    "MobileViT": ("MobileViTModel", {"image_size": 64, "hidden_sizes": [12, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16]}),
    "MobileViT v2": ("MobileViTV2Model", {"image_size": 64}),
    "MobileNet v2": ("MobileNetV2Model", {}),
    "ResNet": ("ResNetModel", {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}),
    "RegNet": ("RegNetModel", {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "groups_width": 4}),
    "DPT": ("DPTForDepthEstimation", {**PICTURE, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "reassemble_factors": [4, 2, 1, 0.5]}),
    "GLPN": ("GLPNForDepthEstimation", {"hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2], "depths": [1, 1, 1, 1], "decoder_hidden_size": 8}),
    "Hiera": ("HieraModel", {"image_size": [64, 64], "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]}),
    "FocalNet": ("FocalNetModel", {"image_size": 64, "embed_dim": 8, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16]}),
    "BiT": ("BitModel", {"embedding_size": 8, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_groups": 4}),
    "EfficientNet": ("EfficientNetModel", {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320}),
    "UPerNet on Swin": ("UperNetForSemanticSegmentation", {"hidden_size": 8, "auxiliary_in_channels": 8}),
    "VitDet": ("VitDetModel", {**{k: v for k, v in PICTURE.items() if k != "intermediate_size"}, "window_block_indices": [0], "window_size": 2, "residual_block_indices": []}),
    "SAM vision": ("SamVisionModel", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 16, "window_size": 2, "global_attn_indexes": [1], "output_channels": 8, "mlp_dim": 24}),
}  # fmt: skip

#: Sizes of small models, by the names that configurations have for them.
SIZES: dict[str, Any] = {
    **{name: size for size, names in {
        16: """
            hidden_size d_model n_embd dim emb_dim embed_dim embedding_size projection_dim lru_width
            num_mel_bins patch_size
        """,
        2: """
            num_hidden_layers num_attention_heads num_key_value_heads n_layer n_layers n_head n_heads
            encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads num_layers
            num_decoder_layers num_heads num_experts_per_tok num_feat_extract_layers
            num_conv_pos_embedding_groups mamba_expand eos_token_id
        """,
        24: """
            intermediate_size n_inner encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim hidden_dim
            moe_intermediate_size shared_expert_intermediate_size mlp_dim max_length
        """,
        64: "max_position_embeddings n_positions max_source_positions image_size",
        50: "vocab_size",
        8: """
            head_dim d_kv kv_lora_rank q_lora_rank v_head_dim sliding_window attention_window
            num_conv_pos_embeddings decoder_hidden_size
        """,
        4: """
            num_local_experts num_experts n_routed_experts qk_rope_head_dim qk_nope_head_dim rotary_dim
            mamba_d_state state_size ssm_state_size num_frames
        """,
        3: "num_channels conv_L_cache",
        1: "n_group topk_group n_groups bos_token_id decoder_start_token_id first_k_dense_replace",
        0: "pad_token_id",
    }.items() for name in names.split()},
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "conv_dim": [8, 8],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "tubelet_size": [2, 16, 16],
}  # fmt: skip
#: Types of configurations whose base model is made with these sizes, by what it is given: shapes of inputs, and the dims cut.
TYPES: list[tuple[dict[str, tuple[int, ...]], tuple[int, ...], str]] = [
    ({"input_ids": (2, 24)}, (1,), """
        afmoe apertus apertus1p5_text arcee aria_text axk2 bailing_hybrid bart beam bert-generation big_bird
        bigbird_pegasus biogpt bitnet camembert canine clip_text_model codegen cohere cohere2 cohere2_moe convbert
        cpmant ctrl cwm data2vec-text deberta deepseek_v2 deepseek_v32 deepseek_v4 diffllama doge dpr ernie ernie4_5
        ernie4_5_moe esm esmc eurobert exaone4 exaone_moe falcon_h1 falcon_mamba flaubert flex_olmo flint gemma
        gemma3_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_bigcode gpt_neox_japanese gpt_oss gptj granite
        granite_docling_text granite_swa granitemoe granitemoe_swa granitemoeshared gte helium higgs_audio_v2 hrm_text
        hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax ibert imagegpt inkling_text jais2 jamba jetmoe
        jina_embeddings_v3 kimi_linear kolibri1 laguna lara_mini layoutlm led lfm2 lfm3 llama4_text longformer markuplm
        mbart megatron-bert mellum minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral4
        mistral_large4_text mixtral mobilebert modernbert-decoder molmo2_text moshi mpnet mpt muse_glimmer_text
        muse_spark_text mvp nanochat nemotron nemotron_h nomic_bert olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt
        openai_privacy_filter persimmon phi3 phimoe plbart qwen2_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
        qwen3_vl_moe_text qwen3_vl_text qwen4_exp_text recurrent_gemma rembert roberta-prelayernorm roformer sarvam_mla
        seed_oss smollm3 solar_open splinter squeezebert stablelm starcoder2 tapas tipsv2_text_model ultrabert
        vaultgemma visual_bert xlm xlm-roberta xlm-roberta-xl yoso
    """),
    ({"input_ids": (2, 24), "decoder_input_ids": (2, 24)}, (1,), """
        blenderbot blenderbot-small longt5 m2m_100 marian mt5 nllb-moe pegasus pegasus_x switch_transformers t5
        umt5
    """),
    ({"pixel_values": (2, 3, 64, 64)}, (2, 3), """
        aimv2_vision_model chinese_clip_vision_model data2vec-vision dinov2_with_registers dinov3_convnext dinov3_vit
        dpt ijepa internvl_vision mlcd_vision_model mobilenet_v1 pixio pixtral pp_ocrv6_small_rec pp_ocrv6_tiny_rec
        qianfan_ocr_vision radio sam3_vit_model sam_hq_vision_model sapiens2 segformer swiftformer tipsv2_vision_model
        vit_msn yolos
    """),
    ({"pixel_values": (1, 4, 3, 64, 64)}, (3, 4), """
        timesformer vivit
    """),
    ({"input_values": (2, 400)}, (1,), """
        data2vec-audio hubert sew sew-d unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm
    """),
    ({"input_values": (2, 1, 400)}, (2,), """
        omniasr_audio
    """),
    ({"input_features": (2, 64, 16)}, (1,), """
        lasr_encoder nemotron3_5_transcribe_asr_audio nemotron3_diarization_audio nemotron_asr_streaming_encoder
        parakeet_encoder
    """),
    ({"input_features": (2, 16, 64)}, (2,), """
        glmasr_encoder voxtral_realtime_encoder
    """),
]  # fmt: skip


def build(name: str, options: dict[str, Any]) -> Any:
    """Make a model from a small configuration."""
    options = dict(options)
    kind = getattr(tf, name)
    how = options.pop("attn_implementation", None)
    config = kind.config_class(**options)
    if how is not None:
        config._attn_implementation = how
    if name.startswith("UperNet"):
        stages = {
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
            "depths": [1, 1, 1, 1],
            "num_heads": [1, 1, 2, 2],
        }
        config.backbone_config = tf.SwinConfig(image_size=64, embed_dim=8, window_size=2, **stages)
        config.auxiliary_in_channels, config.pool_scales = 32, [1, 2]
    return kind(config)


def small(kind: str) -> Any:
    """Make the base model of a type of configuration, with those of the sizes that it has."""
    configured = tf.CONFIG_MAPPING[kind]
    usual = configured()
    lists = {name for name in SIZES if isinstance(getattr(usual, name, None), list | tuple)}
    own = [name for name, size in SIZES.items() if hasattr(usual, name) and isinstance(size, list) is (name in lists)]
    config = configured(**{name: SIZES[name] for name in own})
    config.use_cache, config._experts_implementation = False, "eager"  # grouped products of experts know no float64
    config.apply_spec_augment = False  # draws by NumPy, from what each rank holds
    made: Any = tf.MODEL_MAPPING[type(config)]
    return (made[0] if isinstance(made, tuple) else made)(config)


def inputs_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return numbers of tokens, or pictures and sounds, of these shapes."""
    return {
        name: torch.randint(3, 50, shape) if "ids" in name else torch.randn(shape) for name, shape in shapes.items()
    }


def text(make: Callable[[], Any]) -> Case:
    """Return a case of token ids, cut along the sequence."""
    return Case(
        build=make,
        inputs=lambda: {"input_ids": torch.randint(3, 50, (2, 24))},
        cut={"input_ids": (1,)},
        call=lambda model, input_ids: without_cache(model, input_ids=input_ids),
    )


def without_cache(model: Any, **given: Any) -> Any:
    """Return the outputs that are tensors, and no cache of keys and values."""
    out = model(**given, use_cache=False) if hasattr(model.config, "use_cache") else model(**given)
    return {key: value for key, value in out.items() if key not in ("past_key_values", "cache_params", "state")}


def cases() -> dict[str, Case]:
    found = {name: text(partial(build, kind, options)) for name, (kind, options) in TEXTS.items()}
    for name in ("Gemma2", "Mamba", "Mamba2"):  # .float() in their code
        found[name] = replace(found[name], tolerance=1e-4)
    for name in ("Bert", "Llama", "T5 encoder", "GPT2"):
        kind, options = TEXTS[name]
        found[f"{name} from embeddings"] = Case(
            build=partial(build, kind, options),
            inputs=lambda: {"inputs_embeds": torch.randn(2, 24, 16)},
            cut={"inputs_embeds": (1,)},
            call=without_cache,
        )
        found[f"{name} masked"] = Case(
            build=partial(build, kind, options),
            inputs=lambda: {
                "inputs_embeds": torch.randn(2, 24, 16),
                "attention_mask": (torch.arange(24) < torch.tensor([[24], [17]])).long(),
            },
            cut={"inputs_embeds": (1,), "attention_mask": (1,)},
            call=without_cache,
        )
    for name, (kind, options) in PICTURES.items():
        side = options.get("image_size", 64)
        side = side[0] if isinstance(side, list) else side
        found[name] = image(
            partial(build, kind, options), 2, 3, side, side, call=lambda model, x: without_cache(model, pixel_values=x)
        )
    for shapes, dims, names in TYPES:
        for name in names.split():
            found[f"type {name}"] = Case(
                build=partial(small, name),
                inputs=partial(inputs_of, shapes),
                cut=dict.fromkeys(shapes, dims),
                call=without_cache,
                train="input_values" not in shapes,  # in training their inputs have to be leaves without gradients
                tolerance=1e-5,  # many have norms and positions in single precision, whatever they are given
            )
    # its mask, in single precision, is multiplied by the least number of the scores' dtype: NaN in double precision
    found["type canine"] = replace(found["type canine"], dtype=torch.float32, tolerance=1e-4)
    series = {
        "prediction_length": 4,
        "context_length": 24,
        "num_input_channels": 3,
        "patch_length": 4,
        "patch_stride": 4,
        "d_model": 8,
    }
    for name, options in {
        "PatchTSTForPrediction": {
            **series,
            "stride": 4,
            "num_attention_heads": 2,
            "ffn_dim": 16,
            "num_hidden_layers": 2,
        },
        "PatchTSMixerForPrediction": {**series, "num_layers": 2},
    }.items():
        found[name] = Case(
            build=partial(build, name, options),
            inputs=lambda: {"past_values": torch.randn(2, 24, 3)},
            cut={"past_values": (1,)},
        )
    found["Perceiver"] = Case(
        build=partial(build, "PerceiverModel", {"num_latents": 6, "d_latents": 16, "d_model": 16, "num_blocks": 1,
                      "num_self_attends_per_block": 1, "num_self_attention_heads": 2, "num_cross_attention_heads": 2}),
        inputs=lambda: {"inputs": torch.randn(2, 24, 16)},
        cut={"inputs": (1,)},
    )  # fmt: skip
    found["VideoMAE"] = Case(
        build=partial(build, "VideoMAEModel", {**PICTURE, "num_frames": 4}),
        inputs=lambda: {"pixel_values": torch.randn(1, 4, 3, 64, 64)},
        cut={"pixel_values": (3, 4)},
    )
    return found
