"""What does no arithmetic: views, copies, casts, fills, random numbers, selection, indexing, bit logic.

They move bytes (`moved.py`) but cost no FLOPs. Being listed here is what tells "known to be free" from
"unknown". A call that only returns views of its inputs needs no listing.
"""

from __future__ import annotations

from preflop.ops.registry import Kind, Work, flops
from preflop.tape.events import Signature

# Names stand for aten.<name>, aten.<name>_ and the foreach forms.
FREE = """
    clone copy _to_copy to contiguous resize resize_as set zero fill fill_diagonal zeros ones full
    empty empty_strided empty_like zeros_like ones_like full_like new_empty new_empty_strided
    new_zeros new_ones new_full arange linspace logspace eye scalar_tensor empty_permuted
    empty_quantized tril triu tril_indices triu_indices rand randn randint randperm rand_like
    randn_like randint_like normal uniform random bernoulli exponential geometric cauchy log_normal
    multinomial poisson binomial _standard_gamma _sample_dirichlet cat concat concatenate stack
    hstack vstack dstack repeat repeat_interleave roll flip rot90 tile meshgrid cartesian_prod
    block_diag diag diag_embed diagonal_copy diagonal_scatter select_scatter slice_scatter as_strided_scatter
    select_backward slice_backward diagonal_backward unfold_backward unfold_copy index index_select
    index_copy index_fill gather take take_along_dim masked_select masked_fill masked_scatter where
    scatter put nonzero nonzero_static one_hot argwhere masked_scatter_backward
    value_selecting_reduction_backward constant_pad_nd pad reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d pixel_shuffle
    pixel_unshuffle channel_shuffle im2col upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d logical_and
    logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
    bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ __iand__
    __ior__ __ixor__ any all isin embedding embedding_renorm real imag complex view_as_complex_copy
    view_as_real_copy view_copy expand_copy permute_copy transpose_copy t_copy slice_copy
    select_copy squeeze_copy unsqueeze_copy split_copy split_with_sizes_copy unbind_copy detach_copy
    alias_copy as_strided_copy _reshape_copy _reshape_alias_copy lift lift_fresh lift_fresh_copy
    _conj_physical conj_physical _neg_view_copy resolve_conj resolve_neg _pack_padded_sequence
    _pad_packed_sequence _nested_tensor_from_mask nested_to_padded_tensor _to_sparse _to_sparse_csr
    _to_sparse_csc to_dense _to_dense to_mkldnn coalesce _coalesce _indices _values
    sparse_coo_tensor _sparse_coo_tensor_with_dims _local_scalar_dense item is_same_size
    record_stream pin_memory _pin_memory _assert_async _assert_scalar _assert_tensor_metadata
    sym_size sym_stride sym_numel sym_storage_offset _reshape_from_tensor _mkldnn_reshape
    mkldnn_reorder_conv2d_weight movedim swapaxes _unsafe_index _unsafe_masked_index
    _propagate_xla_data _fill_mem_eff_dropout_mask _cudnn_init_dropout_state
    _cudnn_rnn_flatten_weight _has_compatible_shallow_copy_type _nnz _functional_assert_async
    squeeze unsqueeze transpose detach t view_as_real view_as_complex _unsafe_view reshape flatten
    unflatten ravel narrow chunk split tensor_split hsplit vsplit dsplit expand broadcast_to
    broadcast_tensors permute adjoint diagonal unbind swapdims moveaxis atleast_1d atleast_2d
    atleast_3d _dim_arange type_as data unfold as_strided view alias is_nonzero is_floating_point
    size stride numel dim is_pinned requires_grad _version native_channel_shuffle _make_dual
    _unpack_dual _stack column_stack row_stack _lazy_clone _copy_from
    _new_zeros_with_same_feature_meta _efficientzerotensor range diagflat fliplr flipud
    split_with_sizes unsafe_split unsafe_chunk unsafe_split_with_sizes expand_as view_as reshape_as
    narrow_copy _reshape_alias sym_constrain_range sym_constrain_range_for_size
    _functional_assert_scalar _is_all_true _is_any_true _has_same_storage_numel is_contiguous
    is_complex is_coalesced _coalesced sparse_dim dense_dim _dimI _dimV indices values crow_indices
    col_indices ccol_indices row_indices _indices_copy _values_copy indices_copy values_copy
    _sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims_and_tensors sparse_compressed_tensor
    _sparse_compressed_tensor_unsafe _sparse_csr_tensor_unsafe sparse_csr_tensor sparse_mask
    _to_sparse_bsr _to_sparse_bsc to_sparse to_sparse_csr to_sparse_csc
    _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo
    _validate_sparse_coo_tensor_args _validate_sparse_csr_tensor_args
    _validate_sparse_compressed_tensor_args sparse_resize sparse_resize_and_clear is_conj is_neg
    is_leaf isreal is_inference is_signed is_distributed storage_offset result_type can_cast
    promote_types select slice combinations pad_sequence set_data _cast_Float _cast_Half
    _cast_Double _cast_Long _cast_Int _autocast_to_full_precision _autocast_to_reduced_precision
    _chunk_cat max_unpool2d max_unpool3d hann_window hamming_window blackman_window bartlett_window
    kaiser_window fft_fftfreq fft_rfftfreq _conj conj __ilshift__ __irshift__ _resize_output _to_cpu
    _print
""".split()


def free(sig: Signature) -> Work:
    """No FLOPs: the call does no arithmetic."""
    return Work(0, Kind.OTHER)


def _register_free() -> None:
    for name in FREE:
        flops(f"aten.{name}", f"aten.{name}_", f"aten._foreach_{name}", f"aten._foreach_{name}_")(free)


_register_free()

# Helpers of torch itself that carry a tensor on and compute nothing.
flops(
    "prim.device",
    "prims.convert_element_type",
    "prims.view_of",
    "prims.clone",
    "prims.iota",
    "rngprims.philox_rand",
    "inductor.accumulate_grad_",
    "profiler._record_function_enter_new",
    "profiler._record_function_exit",
)(free)
