"""Blocks of KV memory: who holds which. Pure: the contents are the workers' business."""
