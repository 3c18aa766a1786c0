// Blocking of a product, that is, its partition into chunks.
#pragma once
namespace kvferry {

// Panels and rows per chunk, and number of chunks.
struct Blocking {
  int panels = 0, rows = 0, count = 0;
  int row_blocks = 0, panel_blocks = 0;
  bool rows_first = false;  // consecutive chunks share rows; otherwise they share panels
};

}  // namespace kvferry
