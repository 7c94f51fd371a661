"""Embeddings of texts, and the ranking of documents for a query.

``Embedder`` is what callers hold. A thread of its own owns the context and batches the texts of all callers, who take
turns.
"""
