// Keys and values of 16 tokens at a time, out of the pages of one layer and into panels.
// Included once per level, after tiles.hpp.

// Which layer's pages, and how they and the heads lie.
struct AttentionGeometry {
  int layer, num_layers, kv_heads, group, head_dim, block_tokens;
  float scale;
};

template <bool NarrowPages>
static inline size_t row_bytes(const AttentionGeometry& g) {
  return size_t(g.head_dim) * (NarrowPages ? 2 : 4);
}

// Where the key of one token stands; its value stands `half_bytes` behind.
template <bool NarrowPages>
static inline const uint8_t* key_at(const Batch& batch, const AttentionGeometry& g, const Sequence& s, int kv_head, int token) {
  const size_t page = size_t(s.pages[token / g.block_tokens]), place = size_t(token % g.block_tokens);
  return batch.pages + (((page * g.num_layers + g.layer) * 2 * g.kv_heads + kv_head) * g.block_tokens + place) * row_bytes<NarrowPages>(g);
}
template <bool NarrowPages>
static inline size_t half_bytes(const AttentionGeometry& g) {
  return size_t(g.kv_heads) * g.block_tokens * row_bytes<NarrowPages>(g);
}

// 16 tokens that stand one behind the other.
struct Unit {
  const uint8_t *keys, *values;
};
constexpr size_t kUnitBytes = size_t(16) * kMaxHeadDim * 4;  // of its keys, at most

// Tokens [first, first + 16): in their page, or copied to `copy` [2][kUnitBytes] if they are of several, or if some are
// from `end` on, which count as zeros.
template <bool NarrowPages>
static inline Unit unit_at(const Batch& batch, const AttentionGeometry& g, const Sequence& s, int kv_head, int first, int end, uint8_t* copy) {
  const size_t values = half_bytes<NarrowPages>(g), row = row_bytes<NarrowPages>(g);
  if (first + 16 <= end && first % g.block_tokens + 16 <= g.block_tokens) {
    const uint8_t* keys = key_at<NarrowPages>(batch, g, s, kv_head, first);
    return {keys, keys + values};
  }
  for (int t = 0; t < 16; ++t) {
    uint8_t *key = copy + t * row, *value = copy + kUnitBytes + t * row;
    if (first + t < end) {
      const uint8_t* from = key_at<NarrowPages>(batch, g, s, kv_head, first + t);
      std::memcpy(key, from, row);
      std::memcpy(value, from + values, row);
    } else {
      std::memset(key, 0, row);
      std::memset(value, 0, row);
    }
  }
  return {copy, copy + kUnitBytes};
}

constexpr int kUnitsAhead = 4;  // sixteens of tokens that are asked for ahead

// Asks for a row before it is needed: pages lie far apart, so nothing else foresees them. One row with each that is
// packed, because whoever asks for many at once is not heard; and into the second cache, which can wait for twice as many
// lines as the first. Where pages have fewer than 16 tokens, some of what is asked for is somebody else's.
[[gnu::always_inline]] static inline void fetch_row(const uint8_t* row, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

#if KVFERRY_PAIRS
// [16 tokens][32 values], tokens `row` bytes apart, to [16 pairs][16 tokens][2].
static inline void transpose_pairs(const uint8_t* from, size_t row, const uint8_t* ahead, uint8_t* out) {
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    r[i] = _mm512_loadu_si512(from + i * row);
    fetch_row(ahead + i * row, 64);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(out + size_t(i) * 64, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_si512(out + size_t(i + 4) * 64, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_si512(out + size_t(i + 8) * 64, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_si512(out + size_t(i + 12) * 64, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
  }
}
#endif

// Values of one token, 16 of them, as floats.
template <bool NarrowPages>
static inline V values_at(const uint8_t* token, int d) {
  return NarrowPages ? v_load_bf16((const uint16_t*)token + d) : v_load((const float*)token + d);
}

// 16 keys to one panel; `ahead`: 16 others that will be wanted.
template <bool Pairs, bool NarrowPages>
static inline void pack_keys(const AttentionGeometry& g, const uint8_t* keys, const uint8_t* ahead, uint8_t* out) {
  const size_t row = row_bytes<NarrowPages>(g);
  if constexpr (Pairs) {
#if KVFERRY_PAIRS
    int d = 0;
    for (; d + 32 <= g.head_dim; d += 32) transpose_pairs(keys + d * 2, row, ahead + d * 2, out + size_t(d) * 32);
    for (int t = 0; d < g.head_dim && t < 16; ++t) fetch_row(ahead + t * row + d * 2, 64);
    for (; d < g.head_dim; d += 2)
      for (int t = 0; t < 16; ++t) std::memcpy(out + size_t(d) * 32 + t * 4, keys + t * row + d * 2, 4);
#endif
  } else {
    for (int d = 0; d < g.head_dim; d += 16) {
      const int begin = d * 16 / g.head_dim, end = (d + 16) * 16 / g.head_dim;
      for (int t = begin; t < end; ++t) fetch_row(ahead + t * row, row);
      v_transpose<NarrowPages>(keys + row / g.head_dim * d, row, (float*)out + size_t(d) * 16);
    }
  }
}

// 16 tokens' values to panels of 16 values each, `stride` bytes apart.
template <bool Pairs, bool NarrowPages>
static inline void pack_values(const AttentionGeometry& g, const uint8_t* values, const uint8_t* ahead, uint8_t* out, size_t stride) {
  const size_t row = row_bytes<NarrowPages>(g);
  for (int t = 0; t < 16; t += Pairs ? 2 : 1) {
    const uint8_t* a = values + t * row;
    fetch_row(ahead + t * row, row);
    if constexpr (Pairs) {
#if KVFERRY_PAIRS
      const uint8_t* b = a + row;
      uint8_t* to = out + size_t(t / 2) * 64;
      fetch_row(ahead + (t + 1) * row, row);
      int d = 0;
      for (; d + 32 <= g.head_dim; d += 32) {
        P first, second;
        p_interleave(p_load(a + d * 2), p_load(b + d * 2), first, second);
        p_store(to + size_t(d / 16) * stride, first);
        p_store(to + size_t(d / 16 + 1) * stride, second);
      }
      if (d < g.head_dim) p_store(to + size_t(d / 16) * stride, p_interleave_half((const uint16_t*)a + d, (const uint16_t*)b + d));
#endif
    } else {
      for (int d = 0; d < g.head_dim; d += 16)
        v_store((float*)(out + size_t(d / 16) * stride) + size_t(t) * 16, values_at<NarrowPages>(a, d));
    }
  }
}
