// Matrix products over packed panels: each output is one chain of additions in the order of its inputs, whatever the
// number of rows, so a row's result does not depend on what shares its batch.
//
//   plain   out = x0 w0 + x1 w1 + ...                                          (f32, f16, bf16)
//   codes   out = sum over blocks of  scale * (x0 c0 + x1 c1 + ...) + minimum * (x0 + x1 + ...)
//
// Few rows read the packed panel once and unpack it in registers (`fused`); many rows unpack a few panels into scratch
// that stays in a core's own cache, and multiply tiles of rows with it (`tile`). Both do the same arithmetic.
// Included once per level, inside its namespace, after its vec_*.hpp.

// Calls f(integral_constant<n>) for n in 1 .. Most.
template <int N>
struct Count {
  static constexpr int value = N;
};
template <int Most, class F>
static inline void with_count(int n, F&& f) {
  if constexpr (Most > 1) {
    if (n < Most) {
      with_count<Most - 1>(n, f);
      return;
    }
  }
  f(Count<Most>{});
}

// Rows of inputs, in the form that the level multiplies: floats, pairs of bfloat16, or both.
struct Input {
  float* wide = nullptr;      // [rows][stride]
  uint16_t* narrow = nullptr; // [rows][stride]
  float* sums = nullptr;      // [rows][stride / kSumWidth]
  int stride = 0;             // a multiple of kGroup

  Input from(int row) const {
    return {wide + size_t(row) * stride, narrow + size_t(row) * stride, sums + size_t(row) * (stride / kSumWidth),
            stride};
  }
};

#if KVFERRY_PAIRS
static inline bool takes_pairs(Format format) { return format != Format::f32 && format != Format::f16; }
constexpr int kTileRows = 6, kTileColumns = 4, kFusedRows = 4;
#else
static inline bool takes_pairs(Format) { return false; }
constexpr int kTileRows = 4, kTileColumns = 1, kFusedRows = 2;
#endif
constexpr int kChunkPanels = 4;  // what a chunk unpacks at a time
constexpr int kAhead = 2048;     // bytes that a stream is fetched ahead

// Columns of a tile where so many panels are left: 4, 2 or 1.
static inline int widest_of(int panels) { return panels >= kTileColumns ? kTileColumns : kTileColumns > 2 && panels >= 2 ? 2 : 1; }
template <class F>
static inline void with_width(int columns, F&& f) {
  if constexpr (kTileColumns > 2) {
    if (columns == 2) {
      f(Count<2>{});
      return;
    }
  }
  if (kTileColumns > 1 && columns == kTileColumns) {
    f(Count<kTileColumns>{});
  } else {
    f(Count<1>{});
  }
}

// Always inlined: the compiler takes a function that only prefetches for one without effect, and drops its calls.
[[gnu::always_inline]] static inline void fetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// --- many rows: tiles over unpacked panels -------------------------------------------------------------------------

// out [R][C * 16] = x [R] times C panels of floats [k][16].
template <int R, int C>
static inline void tile_wide(const float* x, size_t x_stride, const float* w, size_t w_stride, int k, float* out, int out_stride = C * kPanel) {
  V sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = v_zero();
  for (int i = 0; i < k; ++i) {
    V panel[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) panel[c] = v_load(w + c * w_stride + size_t(i) * kPanel);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V a = v_set(x[r * x_stride + i]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = v_fma(a, panel[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) v_store(out + r * out_stride + c * kPanel, sum[r][c]);
}

#if KVFERRY_PAIRS
static inline uint32_t pair_at(const uint16_t* p) {
  uint32_t pair;
  std::memcpy(&pair, p, 4);
  return pair;
}

// The same with pairs of inputs: panels [k2][16][2].
template <int R, int C>
static inline void tile_pairs(const uint16_t* x, size_t x_stride, const uint8_t* w, size_t w_stride, int k2, float* out, int out_stride = C * kPanel) {
  V sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = v_zero();
  for (int i = 0; i < k2; ++i) {
    P panel[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      panel[c] = p_load(w + c * w_stride + size_t(i) * 64);
      if constexpr (R <= kFusedRows) fetch(w + c * w_stride + size_t(i) * 64 + kAhead);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const P a = p_set(pair_at(x + r * x_stride + 2 * i));
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = p_dot(sum[r][c], a, panel[c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) v_store(out + r * out_stride + c * kPanel, sum[r][c]);
}
#endif

// What earlier blocks gave, and one block's sums, scaled.
static inline V add_block(V before, V sum, V scale, const V* minimum, float inputs) {
  const V after = v_fma(scale, sum, before);
  return minimum ? v_fma(*minimum, v_set(inputs), after) : after;
}

static inline float block_sum(const float* sums, int index, int block) {
  return block == 2 * kSumWidth ? sums[2 * index] + sums[2 * index + 1] : sums[index];
}

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
  uint8_t* codes;   // per panel: floats [depth][16], or pairs [depth / 2][16][2]
  float* scales;    // per panel: [blocks][2][16]
  size_t code_stride;   // bytes between panels
  size_t scale_stride;  // floats between panels
};

template <bool Pairs, int R, int C>
static inline void tile_codes(const Matrix& m, const Input& x, const Unpacked& w, float* out) {
  const bool has_min = m.has_min || m.offset != 0.0f;
  V total[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) total[r][c] = v_zero();
  for (int b = 0, blocks = m.depth / m.block; b < blocks; ++b) {
    V sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = v_zero();
    if constexpr (Pairs) {
#if KVFERRY_PAIRS
      for (int i = b * m.block / 2, end = i + m.block / 2; i < end; ++i) {
        P panel[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) panel[c] = p_load(w.codes + c * w.code_stride + size_t(i) * 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const P a = p_set(pair_at(x.narrow + size_t(r) * x.stride + 2 * i));
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) sum[r][c] = p_dot(sum[r][c], a, panel[c]);
        }
      }
#endif
    } else {
      for (int i = b * m.block, end = i + m.block; i < end; ++i) {
        V panel[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) panel[c] = v_load((const float*)(w.codes + c * w.code_stride) + size_t(i) * kPanel);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const V a = v_set(x.wide[size_t(r) * x.stride + i]);
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) sum[r][c] = v_fma(a, panel[c], sum[r][c]);
        }
      }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const float* scales = w.scales + c * w.scale_stride + size_t(b) * 2 * kPanel;
      const V scale = v_load(scales), minimum = v_load(scales + kPanel);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float inputs = block_sum(x.sums + size_t(r) * (x.stride / kSumWidth), b, m.block);
        total[r][c] = add_block(total[r][c], sum[r][c], scale, has_min ? &minimum : nullptr, inputs);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) v_store(out + (r * C + c) * kPanel, total[r][c]);
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

// --- few rows: unpacked in registers, each byte of the matrix read once --------------------------------------------

// Plain 16-bit panels for a level that multiplies floats.
template <Format F, int R, int C>
static inline void fused_wide(const Matrix& m, int panel, const Input& x, float* out) {
  V sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = v_zero();
  const uint8_t* at[C];
  for (int c = 0; c < C; ++c) at[c] = m.data + size_t(panel + c) * m.panel_bytes;
  for (int i = 0; i < m.depth; i += 2) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      V first, second;
      if constexpr (F == Format::bf16) {
        v_load_pairs((const uint16_t*)at[c] + size_t(i) * kPanel, first, second);
        fetch(at[c] + size_t(i) * 32 + kAhead);
      } else {
        first = v_load_half((const uint16_t*)at[c] + size_t(i) * kPanel);
        second = v_load_half((const uint16_t*)at[c] + size_t(i + 1) * kPanel);
        fetch(at[c] + size_t(i) * 32 + kAhead);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r][c] = v_fma(v_set(x.wide[size_t(r) * x.stride + i]), first, sum[r][c]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r][c] = v_fma(v_set(x.wide[size_t(r) * x.stride + i + 1]), second, sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) v_store(out + (r * C + c) * kPanel, sum[r][c]);
}

template <Format F, bool Pairs, int R, int C>
static inline void fused_codes(const Matrix& m, int panel, const Input& x, float* out) {
  const bool has_min = m.has_min || m.offset != 0.0f;
  V total[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) total[r][c] = v_zero();
  const uint8_t* at[C];
  for (int c = 0; c < C; ++c) at[c] = m.data + size_t(panel + c) * m.panel_bytes;
#if KVFERRY_PAIRS
  const P table = p_table4();
#endif
  for (int b = 0, blocks = m.depth / m.block; b < blocks; ++b) {
    V sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = v_zero();
    const int start = b * m.block;
    if constexpr (F == Format::codes4) {
      for (int g = 0; g < m.block / 8; ++g) {
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
      for (int i = 0; i < m.block / 2; ++i) {
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
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float inputs = block_sum(x.sums + size_t(r) * (x.stride / kSumWidth), b, m.block);
        total[r][c] = add_block(total[r][c], sum[r][c], scale, has_min ? &minimum : nullptr, inputs);
      }
      at[c] += m.block_bytes();
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) v_store(out + (r * C + c) * kPanel, total[r][c]);
}

// R rows times C panels from `panel` on.
template <int R, int C>
static inline void fused(const Matrix& m, int panel, const Input& x, float* out) {
  const uint8_t* data = m.data + size_t(panel) * m.panel_bytes;
  switch (m.format) {
    case Format::f32:
      tile_wide<R, C>(x.wide, x.stride, (const float*)data, m.panel_bytes / 4, m.depth, out);
      break;
    case Format::f16:
      fused_wide<Format::f16, R, C>(m, panel, x, out);
      break;
    case Format::bf16:
#if KVFERRY_PAIRS
      tile_pairs<R, C>(x.narrow, x.stride, data, m.panel_bytes, m.depth / 2, out);
#else
      fused_wide<Format::bf16, R, C>(m, panel, x, out);
#endif
      break;
    case Format::codes4:
      fused_codes<Format::codes4, KVFERRY_PAIRS, R, C>(m, panel, x, out);
      break;
    case Format::codes8:
      fused_codes<Format::codes8, KVFERRY_PAIRS, R, C>(m, panel, x, out);
      break;
  }
}

// Bytes of scratch that `product` needs for a matrix.
static inline size_t unpacked_bytes(const Matrix& m) {
  return size_t(kChunkPanels) * (size_t(m.depth) * kPanel * 4 + size_t(m.depth / kSumWidth) * 2 * kPanel * 4);
}

// `rows` rows of x times panels [panel, panel + panels), at most kChunkPanels of them. `put(row, count of rows, panel,
// count of panels, values [rows][panels * 16])` takes each tile.
template <class Put>
static void product(const Matrix& m, const Input& x, int rows, int panel, int panels, uint8_t* scratch, Put&& put) {
  alignas(64) float out[kTileRows * kChunkPanels * kPanel];
  if (rows <= kFusedRows) {
    with_count<kFusedRows>(rows, [&](auto count) {
      constexpr int R = decltype(count)::value;
      constexpr int widest = R == 1 ? kChunkPanels : R <= kFusedRows / 2 ? kChunkPanels / 2 : 1;
      constexpr int C = KVFERRY_PAIRS ? kChunkPanels : widest;
      int p = 0;
      const auto run = [&](auto width) {
        constexpr int W = decltype(width)::value;
        for (; p + W <= panels; p += W) {
          fused<R, W>(m, panel + p, x, out);
          put(0, R, panel + p, W, out);
        }
      };
      run(Count<C>{});
      if constexpr (C > 2) run(Count<2>{});
      if constexpr (C > 1) run(Count<1>{});
    });
    return;
  }
  const bool pairs = takes_pairs(m.format);
  const bool is_direct = m.format == Format::f32 || (pairs && m.format == Format::bf16);
  Unpacked w{scratch, nullptr, size_t(m.depth) * kPanel * (pairs ? 2 : 4), size_t(m.depth / kSumWidth) * 2 * kPanel};
  w.scales = (float*)(scratch + size_t(kChunkPanels) * m.depth * kPanel * 4);
  if (!is_direct)
    for (int p = 0; p < panels; ++p) unpack_panel(m, panel + p, pairs, w.codes + p * w.code_stride, w.scales + p * w.scale_stride);
  for (int p = 0; p < panels;) {
    // Codes need a second set of sums, so their tiles are half as wide.
    const int left = panels - p, columns = widest_of(m.has_codes() && kTileColumns > 2 && left > 2 ? 2 : left);
    for (int row = 0; row < rows; row += kTileRows) {
      const int count = rows - row < kTileRows ? rows - row : kTileRows;
      const Input at = x.from(row);
      with_count<kTileRows>(count, [&](auto number) {
        constexpr int R = decltype(number)::value;
        auto run = [&](auto width) {
          constexpr int C = decltype(width)::value;
          Unpacked here{w.codes + p * w.code_stride, w.scales + p * w.scale_stride, w.code_stride, w.scale_stride};
          if (m.has_codes()) {
            tile_codes<KVFERRY_PAIRS, R, C>(m, at, here, out);
          } else if (!pairs) {
            const uint8_t* data = is_direct ? m.data + size_t(panel + p) * m.panel_bytes : here.codes;
            tile_wide<R, C>(at.wide, at.stride, (const float*)data, (is_direct ? m.panel_bytes : w.code_stride) / 4, m.depth, out);
          } else {
#if KVFERRY_PAIRS
            tile_pairs<R, C>(at.narrow, at.stride, m.data + size_t(panel + p) * m.panel_bytes, m.panel_bytes, m.depth / 2, out);
#endif
          }
        };
        with_width(columns, run);
        put(row, R, panel + p, columns, out);
      });
    }
    p += columns;
  }
}
