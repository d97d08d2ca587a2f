"""From a model's tensors, a machine's rates and a budget to placements: numbers in, plan out."""
