"""Norms of parameters and gradients by foreach calls, with one read of the device.

`parameter_norms`, `params_l2_norm` (Megatron Bridge's), `spectral_norms`; `named_parameters` names what they measure.
"""
