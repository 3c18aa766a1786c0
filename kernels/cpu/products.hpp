// Matrix products over packed panels, whatever the form of the matrix and the number of rows.
//
//   plain   out = x0 w0 + x1 w1 + ...      (f32, f16, bf16)
//   codes   see codes.hpp, and words.hpp where no pairs are multiplied; with inputs rounded to 8 bits, bytes.hpp
//
// Few rows read the packed panel once and unpack it in registers (`fused`); many rows unpack a few panels into scratch
// that stays in a core's own cache, and multiply tiles of rows with it. Both do the same arithmetic.
// Included once per level, after amx.hpp.

// Plain 16-bit panels for a level that multiplies floats.
template <Format F, int R, int C>
static inline void fused_wide(const Matrix& m, int panel, const Rows& x, float* out) {
  V sum[R][C];
  clear(sum);
  const uint8_t* at[C];
  for (int c = 0; c < C; ++c) at[c] = m.data + size_t(panel + c) * m.panel_bytes;
  for (int i = 0; i < m.depth; i += 2) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      V first, second;
      fetch(at[c] + size_t(i) * 32 + kAhead);
      if constexpr (F == Format::bf16) {
        v_load_pairs((const uint16_t*)at[c] + size_t(i) * kPanel, first, second);
      } else {
        first = v_load_half((const uint16_t*)at[c] + size_t(i) * kPanel);
        second = v_load_half((const uint16_t*)at[c] + size_t(i + 1) * kPanel);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r][c] = v_fma(v_set(x.wide[size_t(r) * x.stride + i]), first, sum[r][c]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r][c] = v_fma(v_set(x.wide[size_t(r) * x.stride + i + 1]), second, sum[r][c]);
    }
  }
  store(sum, out);
}

// A 16-bit panel as floats.
static inline void unpack_panel(const Matrix& m, int panel, float* wide) {
  const uint16_t* at = (const uint16_t*)(m.data + size_t(panel) * m.panel_bytes);
  for (int i = 0; i < m.depth; i += 2, at += 2 * kPanel, wide += 2 * kPanel) {
    V first, second;
    if (m.format == Format::bf16) {
      v_load_pairs(at, first, second);
    } else {
      first = v_load_half(at);
      second = v_load_half(at + kPanel);
    }
    v_store(wide, first);
    v_store(wide + kPanel, second);
  }
}

// R rows times C panels from `panel` on.
template <int R, int C>
static inline void fused(const Matrix& m, int panel, const Rows& x, float* out) {
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
    case Format::codes8:
#if KVFERRY_PAIRS
      with_codes(m, [&](auto form) { fused_codes<decltype(form), R, C>(m, panel, x, out); });
#endif
      break;
  }
}

// Bytes of scratch that `product` needs for a matrix.
static inline size_t unpacked_bytes(const Matrix& m) {
  return size_t(kChunkPanels) * m.depth * kPanel * 4;
}

constexpr int kOwnInputs = 2560;  // of unpacked panels of floats that stay in a core's own cache, 64 bytes each

// Panels that `product` is given at a time: where many rows multiply floats, all rows turn to as many as stay in a core's
// own cache.
static inline int panels_at_a_time(const Matrix& m, int rows) {
  if (KVFERRY_PAIRS || m.has_codes() || rows <= kFusedRows) return kChunkPanels;
  const int most = kOwnInputs / m.depth;
  return most < 1 ? 1 : most < kChunkPanels ? most : kChunkPanels;
}

// Columns of a fused tile where so many panels are left.
static inline int fused_columns(const Matrix& m, int rows, int left) {
  // One stream of memory is read faster than four, and one panel's chain of pairs is still faster than memory.
  const int most_pairs = takes_pairs(m.format) && rows <= 2 ? 1 : 4, most_floats = rows == 1 ? 4 : 1;
  const int most = KVFERRY_PAIRS ? most_pairs : most_floats;
  return left >= most ? most : most > 2 && left >= 2 ? 2 : 1;
}

template <class Put>
static void product_fused(const Matrix& m, const Rows& x, int rows, int panel, int panels, Put&& put) {
  alignas(64) float out[kFusedRows * kChunkPanels * kPanel];
  const int step = even_rows(rows, kFusedRows);
  for (int p = 0, columns; p < panels; p += columns) {
    columns = fused_columns(m, rows, panels - p);
    for (int row = 0; row < rows; row += step) {
      const Rows at = x.from(row);
      with_count<kFusedRows>(rows - row < step ? rows - row : step, [&](auto count) {
        constexpr int R = decltype(count)::value;
        if constexpr (KVFERRY_PAIRS || R == 1) {  // see fused_columns
          if (columns == 4) fused<R, 4>(m, panel + p, at, out);
          if (columns == 2) fused<R, 2>(m, panel + p, at, out);
        }
        if (columns == 1) fused<R, 1>(m, panel + p, at, out);
        put(Tile{row, R, panel + p, columns, out});
      });
    }
  }
}

// `rows` rows of x times panels [panel, panel + panels), at most kChunkPanels of them. `put(tile)` takes what is done.
template <class Put>
static void product(const Matrix& m, const Rows& x, int rows, int panel, int panels, uint8_t* scratch, Put&& put) {
#if KVFERRY_AMX
  if (m.format == Format::bf16) return unit_product_of_pairs(m, x, rows, panel, panels, put);
  if (m.has_codes() && !x.forms.bytes) return unit_product_of_codes<false>(m, x, rows, panel, panels, scratch, put);
  if (m.has_codes() && rows > kByteRows) return unit_product_of_codes<true>(m, x, rows, panel, panels, scratch, put);
#endif
  if (x.forms.bytes && m.has_codes() && (KVFERRY_PAIRS || rows <= kByteRows)) return product_of_bytes(m, x, rows, panel, panels, put);
#if !KVFERRY_PAIRS
  if (m.has_codes()) return product_of_words(m, x, rows, panel, panels, scratch, put);
#endif
  if (rows <= kFusedRows || m.has_codes()) return product_fused(m, x, rows, panel, panels, put);
  alignas(64) float out[kTileRows * kChunkPanels * kPanel];
  const int step = even_rows(rows, kTileRows);
  const bool pairs = takes_pairs(m.format), is_direct = pairs || m.format == Format::f32;
  float* unpacked = (float*)scratch;
  const size_t unpacked_stride = size_t(m.depth) * kPanel;
  if (!is_direct)
    for (int p = 0; p < panels; ++p) unpack_panel(m, panel + p, unpacked + p * unpacked_stride);
  for (int row = 0; row < rows; row += step) {
    const Rows at = x.from(row);
    with_count<kTileRows>(rows - row < step ? rows - row : step, [&](auto number) {
      constexpr int R = decltype(number)::value;
      for (int p = 0, columns; p < panels; p += columns) {
        columns = widest_of(panels - p);
        const uint8_t* data = m.data + size_t(panel + p) * m.panel_bytes;
        with_width(columns, [&](auto width) {
          constexpr int C = decltype(width)::value;
#if KVFERRY_PAIRS
          if (pairs) return tile_pairs<R, C>(at.narrow, at.stride, data, m.panel_bytes, m.depth / 2, out);
#endif
          const float* wide = is_direct ? (const float*)data : unpacked + p * unpacked_stride;
          tile_wide<R, C>(at.wide, at.stride, wide, is_direct ? m.panel_bytes / 4 : unpacked_stride, m.depth, out);
        });
        put(Tile{row, R, panel + p, columns, out});
      }
    });
  }
}

// How the chunks of a product share it: see step.hpp. `put(tile)` takes what is done, with the bias if there is one.
template <class Put>
static inline void product_chunk(const Matrix& m, const Rows& rows, int num_rows, const Cut& cut, int chunk, uint8_t* scratch, Put&& put) {
  // Neighbouring chunks share their panels, so that what one core fetched another finds in the shared cache, or their rows.
  const int first_row = (cut.rows_first ? chunk / cut.panel_blocks : chunk % cut.row_blocks) * cut.rows;
  const int first_panel = (cut.rows_first ? chunk % cut.panel_blocks : chunk / cut.row_blocks) * cut.panels;
  const int count = num_rows - first_row < cut.rows ? num_rows - first_row : cut.rows;
  const int last_panel = m.panels < first_panel + cut.panels ? m.panels : first_panel + cut.panels;
  const Rows x = rows.from(first_row);
  const int at_a_time = panels_at_a_time(m, count);
  for (int panel = first_panel; panel < last_panel; panel += at_a_time) {
    const int panels = last_panel - panel < at_a_time ? last_panel - panel : at_a_time;
    product(m, x, count, panel, panels, scratch, [&](Tile tile) {
      tile.row += first_row;
      if (m.bias)
        for (int r = 0; r < tile.rows; ++r)
          for (int c = 0; c < tile.columns; ++c)
            v_store(tile.values + (r * tile.columns + c) * kPanel, v_add(tile.at(r, c), v_load(m.bias + size_t(tile.panel + c) * kPanel)));
      put(tile);
    });
  }
}

// A tile to where it belongs in `to` [..][stride], of which the first `valid` columns are there; what one of the next
// tiles will write is asked for.
static inline void put_tile(const Tile& tile, float* to, size_t stride, int valid) {
  to += size_t(tile.row) * stride + size_t(tile.panel) * kPanel;
  valid -= tile.panel * kPanel;
  for (int r = 0; r < tile.rows; ++r, to += stride)
    for (int c = 0; c < tile.columns; ++c) {
      if (valid - c * kPanel >= kPanel) {
        fetch_below(to + c * kPanel, stride);
        v_store(to + c * kPanel, tile.at(r, c));
      } else if (valid > c * kPanel) {
        alignas(64) float lanes[kPanel];
        v_store(lanes, tile.at(r, c));
        std::memcpy(to + c * kPanel, lanes, size_t(valid - c * kPanel) * 4);
      }
    }
}
