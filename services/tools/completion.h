// Shell completion of commands and options.
#pragma once

#include <CLI/App.hpp>
#include <string>

namespace ballast::services {

// Returns the script for `shell`: "bash", "zsh" or "fish". The script has all commands and options of `app`. An
// option's type name tells its values, "{a,b}", or paths (FILE, DIR). REQUIRES: one level of subcommands.
std::string CompletionScript(const CLI::App& app, const std::string& shell);

}  // namespace ballast::services
