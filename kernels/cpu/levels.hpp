#pragma once
#include <string>
#include <vector>

#include "step.hpp"

namespace kvferry {

// Levels that this machine can run, the slowest first.
std::vector<const Level*> usable_levels();

// One of them by name, or null.
const Level* level_named(const std::string& name);

}  // namespace kvferry
