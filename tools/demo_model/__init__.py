"""The parts of `tools/train_demo_model.py`: text, tokenizer, network, training, export.

Everything is generated from seeds, so the training needs no data set. The network, its training and its export need
PyTorch.
"""
