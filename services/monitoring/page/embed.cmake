# cmake -DOUT=FILE -P embed.cmake: writes the page's files, which lie beside this script, into a C++ source as arrays of bytes.
set(arrays "")
set(rows "")
foreach(row "/|page.html|text/html" "/page.css|page.css|text/css" "/page.js|page.js|text/javascript" "/page.svg|page.svg|image/svg+xml")
  string(REPLACE "|" ";" parts "${row}")
  list(GET parts 0 path)
  list(GET parts 1 file)
  list(GET parts 2 type)
  file(READ "${CMAKE_CURRENT_LIST_DIR}/${file}" bytes HEX)
  string(REGEX REPLACE "(..)" "'\\\\x\\1'," bytes "${bytes}")
  string(MAKE_C_IDENTIFIER "${file}" name)
  string(APPEND arrays "constexpr char k_${name}[] = {${bytes}};\n")
  string(APPEND rows "    {\"${path}\", \"${type}\", {k_${name}, sizeof k_${name}}},\n")
endforeach()
file(WRITE "${OUT}" "// Made by services/monitoring/page/embed.cmake.
#include \"ballast/services/monitoring/page/page.h\"

namespace ballast::services {
namespace {
${arrays}constexpr PageFile kFiles[] = {
${rows}};
}  // namespace
absl::Span<const PageFile> PageFiles() { return kFiles; }
}  // namespace ballast::services
")
