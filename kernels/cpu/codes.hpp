// Matrices of codes, inputs as they are (exact): out = sum over blocks of
//
//   scale * (x0 c0 + x1 c1 + ...) + minimum * (x0 + x1 + ...)
//
// Few rows read the packed panel once and unpack it in registers (`fused_codes`); many rows multiply panels unpacked
// into scratch (`tile_codes`). Both do the same arithmetic.
// Included once per level, after tiles.hpp.

// A form of codes with its width and block known to the compiler; there is none of 4 bits with blocks of 16.
template <Format F, int Block>
struct Codes {
  static constexpr Format format = F;
  static constexpr int block = Block;
  static constexpr int halves = Block / kSumWidth;
};
template <class F>
static inline void with_codes(const Matrix& m, F&& f) {
  if (m.format == Format::codes4) {
    f(Codes<Format::codes4, 32>{});
  } else if (m.block == 32) {
    f(Codes<Format::codes8, 32>{});
  } else {
    f(Codes<Format::codes8, 16>{});
  }
}

// Sums of the inputs of a row's blocks, row after row.
struct BlockSums {
  const float* sums;
  size_t stride;
};
template <int Block>
static inline BlockSums block_sums(const Rows& x) {
  return Block == kGroup ? BlockSums{x.group_sums, size_t(x.stride / kGroup)} : BlockSums{x.half_sums, size_t(x.stride / kSumWidth)};
}

// Column c of one block into the totals; `value(sum, row)` makes floats of a block's sums.
template <int R, int C, class Sum, class Value>
[[gnu::always_inline]] static inline void add_column(V (&total)[R][C], const Sum (&sum)[R][C], int c, V scale, V minimum, bool has_min, const float* inputs, size_t stride, Value&& value) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) total[r][c] = v_fma(scale, value(sum[r][c], r), total[r][c]);
  if (!has_min) return;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) total[r][c] = v_fma(minimum, v_set(inputs[r * stride]), total[r][c]);
}
static inline V as_it_is(V sum, int) { return sum; }

static inline bool adds_minimum(const Matrix& m) { return m.has_min || m.offset != 0.0f; }

// Scales and minima of one block of a packed panel, as floats.
static inline void load_scales(const Matrix& m, const uint8_t* at, V& scale, V& minimum) {
  scale = m.half_scales ? v_load_half((const uint16_t*)at) : v_load((const float*)at);
  if (m.has_min) {
    at += m.scale_bytes();
    minimum = m.half_scales ? v_load_half((const uint16_t*)at) : v_load((const float*)at);
  } else {
    minimum = v_mul(scale, v_set(m.offset));
  }
}

// Unpacked panels of codes: the codes, then scales and minima of each block.
struct Unpacked {
  uint8_t* codes;       // per panel: floats [depth][16], or pairs [depth / 2][16][2]
  float* scales;        // per panel: [blocks][2][16]
  size_t code_stride;   // bytes between panels
  size_t scale_stride;  // floats between panels
};

template <int block, bool Pairs, int R, int C>
static inline void tile_codes(const Matrix& m, const Rows& x, const Unpacked& w, float* out) {
  const bool has_min = adds_minimum(m);
  const BlockSums inputs = block_sums<block>(x);
  V total[R][C];
  clear(total);
  for (int b = 0, blocks = m.depth / block; b < blocks; ++b) {
    V sum[R][C];
    clear(sum);
    if constexpr (Pairs) {
#if KVFERRY_PAIRS
      for (int i = b * block / 2, end = i + block / 2; i < end; ++i) {
        P panel[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) panel[c] = p_load(w.codes + c * w.code_stride + size_t(i) * 64);
        add_pair(sum, x.narrow + 2 * i, x.stride, panel);
      }
#endif
    } else {
      for (int i = b * block, end = i + block; i < end; ++i) {
        V panel[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) panel[c] = v_load((const float*)(w.codes + c * w.code_stride) + size_t(i) * kPanel);
        add_input(sum, x.wide + i, x.stride, panel);
      }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const float* scales = w.scales + c * w.scale_stride + size_t(b) * 2 * kPanel;
      add_column(total, sum, c, v_load(scales), v_load(scales + kPanel), has_min, inputs.sums + b, inputs.stride, as_it_is);
    }
  }
  store(total, out);
}

template <class Form, bool Pairs, int R, int C>
static inline void fused_codes(const Matrix& m, int panel, const Rows& x, float* out) {
  constexpr int block = Form::block;
  const bool has_min = adds_minimum(m);
  const BlockSums inputs = block_sums<block>(x);
  V total[R][C];
  clear(total);
  const uint8_t* at[C];
  for (int c = 0; c < C; ++c) at[c] = m.data + size_t(panel + c) * m.panel_bytes;
#if KVFERRY_PAIRS
  const P table = p_table4();
#endif
  for (int b = 0, blocks = m.depth / block; b < blocks; ++b) {
    V sum[R][C];
    clear(sum);
    const int start = b * block;
    if constexpr (Form::format == Format::codes4) {
      for (int g = 0; g < block / 8; ++g) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          fetch(at[c] + g * 64 + kAhead);
          if constexpr (Pairs) {
#if KVFERRY_PAIRS
            P words[4];
            p_codes4(at[c] + g * 64, table, words);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
#pragma GCC unroll 8
              for (int r = 0; r < R; ++r)
                sum[r][c] = p_dot(sum[r][c], p_set(pair_at(x.narrow + size_t(r) * x.stride + start + g * 8 + 2 * i)), words[i]);
#endif
          } else {
            V values[8];
            v_codes4(at[c] + g * 64, values);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i)
#pragma GCC unroll 8
              for (int r = 0; r < R; ++r)
                sum[r][c] = v_fma(v_set(x.wide[size_t(r) * x.stride + start + g * 8 + i]), values[i], sum[r][c]);
          }
        }
      }
    } else {
      for (int i = 0; i < block / 2; ++i) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          if (i % 2 == 0) fetch(at[c] + i * 32 + kAhead);
          if constexpr (Pairs) {
#if KVFERRY_PAIRS
            const P words = p_codes8((const int8_t*)at[c] + i * 32);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
              sum[r][c] = p_dot(sum[r][c], p_set(pair_at(x.narrow + size_t(r) * x.stride + start + 2 * i)), words);
#endif
          } else {
            V first, second;
            v_codes8((const int8_t*)at[c] + i * 32, first, second);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sum[r][c] = v_fma(v_set(x.wide[size_t(r) * x.stride + start + 2 * i]), first, sum[r][c]);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
              sum[r][c] = v_fma(v_set(x.wide[size_t(r) * x.stride + start + 2 * i + 1]), second, sum[r][c]);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      V scale, minimum;
      load_scales(m, at[c] + m.code_bytes(), scale, minimum);
      add_column(total, sum, c, scale, minimum, has_min, inputs.sums + b, inputs.stride, as_it_is);
      at[c] += m.block_bytes();
    }
  }
  store(total, out);
}

// Floats out of a plain 16-bit panel, or codes and scales out of a panel of codes, as `tile_*` reads them.
static inline void unpack_panel(const Matrix& m, int panel, bool pairs, uint8_t* codes, float* scales) {
  const uint8_t* at = m.data + size_t(panel) * m.panel_bytes;
  float* wide = (float*)codes;
  if (m.format == Format::bf16) {
    for (int i = 0; i < m.depth; i += 2) {
      V first, second;
      v_load_pairs((const uint16_t*)at + size_t(i) * kPanel, first, second);
      v_store(wide + size_t(i) * kPanel, first);
      v_store(wide + size_t(i + 1) * kPanel, second);
    }
    return;
  }
  if (m.format == Format::f16) {
    for (int i = 0; i < m.depth; ++i) v_store(wide + size_t(i) * kPanel, v_load_half((const uint16_t*)at + size_t(i) * kPanel));
    return;
  }
#if KVFERRY_PAIRS
  const P table = p_table4();
#endif
  for (int b = 0, blocks = m.depth / m.block; b < blocks; ++b, at += m.block_bytes()) {
    V scale, minimum;
    load_scales(m, at + m.code_bytes(), scale, minimum);
    v_store(scales + size_t(b) * 2 * kPanel, scale);
    v_store(scales + size_t(b) * 2 * kPanel + kPanel, minimum);
    if (pairs) {
#if KVFERRY_PAIRS
      uint8_t* to = codes + size_t(b) * m.block * 32;
      if (m.format == Format::codes4) {
        for (int g = 0; g < m.block / 8; ++g) {
          P words[4];
          p_codes4(at + g * 64, table, words);
          for (int i = 0; i < 4; ++i) p_store(to + (g * 4 + i) * 64, words[i]);
        }
      } else {
        for (int i = 0; i < m.block / 2; ++i) p_store(to + i * 64, p_codes8((const int8_t*)at + i * 32));
      }
#endif
    } else {
      float* to = wide + size_t(b) * m.block * kPanel;
      if (m.format == Format::codes4) {
        for (int g = 0; g < m.block / 8; ++g) {
          V values[8];
          v_codes4(at + g * 64, values);
          for (int i = 0; i < 8; ++i) v_store(to + (g * 8 + i) * kPanel, values[i]);
        }
      } else {
        for (int i = 0; i < m.block / 2; ++i) {
          V first, second;
          v_codes8((const int8_t*)at + i * 32, first, second);
          v_store(to + (2 * i) * kPanel, first);
          v_store(to + (2 * i + 1) * kPanel, second);
        }
      }
    }
  }
}
