# U-Net skips between the blocks: the write-up's, a weighted concat, a weighted sum

question = "Do U-Net skips beat a plain GPT?"

mechanisms = ["unet_concat", "unet_add", "unet_published"]
