"""Pruned matrices without their zeros: on disk, in memory, and in products.

``matrix`` has the format of one matrix, ``kernels`` products with it, ``gpu`` those on a GPU, ``files`` the format of a
model directory, ``packing`` the way there and back, ``linear`` a layer, ``loading`` a model of transformers with such
layers, and ``semi_structured`` one with the layers that torch has for 2:4.
"""
