// Everything that is compiled once for each level, in the order in which one builds on the other.
// Included within a level's namespace, after its vectors (vec_*.hpp).
#include "tiles.hpp"
//
#include "codes.hpp"
//
#include "bytes.hpp"
//
#include "words.hpp"
//
#include "amx.hpp"
//
#include "products.hpp"
//
#include "pages.hpp"
//
#include "attention.hpp"
//
#include "level.hpp"
//
#include "product_job.hpp"
//
#include "bounds.hpp"
