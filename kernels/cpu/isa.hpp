#pragma once
#include <string>
#include <vector>

namespace kvferry {

// Names of the instruction sets this machine can run and the kernels may be compiled for, weakest first.
std::vector<std::string> supported_isas();

}  // namespace kvferry
