# U-Net skips: the output of block i joins that of block N - i + 1 through a matrix
# unet_add, unet_scalar: a weighted sum, one number per pair of blocks, below 1 or free; unet_published: as
# the write-up has them, a plain linear layer over both, which starts by mixing them up

scale = "tiny"
mechanism = ["unet_concat"]
