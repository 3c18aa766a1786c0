// Matrix products compiled for the baseline of the architecture.
#include "products/dispatch.hpp"
