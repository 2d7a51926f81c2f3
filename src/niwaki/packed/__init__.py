"""Pruned matrices without their zeros: on disk, in memory, and in products.

``matrix`` has the format of one matrix, ``kernels`` products with it, ``files`` the format of a model directory,
``packing`` the way there and back, ``linear`` a layer, and ``loading`` a model of transformers with such layers.
"""
