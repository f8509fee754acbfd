"""What devices are: their figures with sources, and what CUDA's allocator makes of a request.

May import `units` and `errors`, nothing else of Preflop, and never torch.
Not here: anything that knows an operator, a tape or a time (`timing` is where counts meet devices).
"""
