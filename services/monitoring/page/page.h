// The status page: files that a browser asks for, embedded in the program.
#pragma once

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast::services {

struct PageFile {
  absl::string_view path;  // of the request, such as "/page.css"; the document itself is "/"
  const char* type;        // of the content
  absl::string_view bytes;
};

// Lives as long as the program.
absl::Span<const PageFile> PageFiles();

}  // namespace ballast::services
