// Levels of this build that this machine supports.
#pragma once
#include <string>
#include <vector>

#include "step/level.hpp"

namespace kvferry {

// Returns the supported levels, slowest first.
std::vector<const Level*> usable_levels();

// Returns the supported level with this name, or null.
const Level* level_named(const std::string& name);

}  // namespace kvferry
