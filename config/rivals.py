# Mechanisms from the literature, one at a time: --mechanism names another one
# output_gate, output_gate_narrow, output_gate_elementwise: a gate on each head's output; xsa: without what a
# head's own value says; sink: a logit to attend to nothing by; key_offset: half of each key from the token
# before; short_conv, short_conv_kv, short_conv_x: short convolutions of queries, keys and values, or of the
# input; value_residual: the first layer's values in all; value_embedding: values of each token's own;
# query_gain: a learned factor on a head's logits; ssmax: the logarithm of the context on them; score_cap: a
# soft cap on them; alibi, alibi_learned: they fall with distance; relative_bias: a number for each bucket of
# distances; fox: a forget gate; stream_scalars: the embedding again;
# diff, diff_v1: the difference of two maps; paired_heads: a neighbour's keys too; head_mix: sums of heads;
# depth_attention, mudd: blocks read more than the last one's output

scale = "tiny"
mechanism = ["short_conv"]
