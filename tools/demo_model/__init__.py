"""The parts of `tools/train_demo_model.py`: text, tokenizer, network, export."""
