// A source of chunks for tests: keeps the questions, and answers when the test says so.
#pragma once

#include <utility>
#include <vector>

#include "ballast/services/threads/chunk_source.h"

namespace ballast::services {

// Threads: one.
class AskedChunks : public ChunkSource {
 public:
  struct Question {
    v1::ExportRequest request;
    v1::Member from;
    absl::Time deadline;
    Reply<v1::ExportResponse> reply;
  };
  void Fetch(const v1::ExportRequest& request, const v1::Member& from, absl::Time deadline,
             Reply<v1::ExportResponse> reply) override {
    if (request.tell_kept()) return reply(told);
    questions.push_back({request, from, deadline, std::move(reply)});
  }
  std::vector<Question> Take() { return std::exchange(questions, {}); }

  std::vector<Question> questions;
  v1::ExportResponse told;  // the answer to those who ask which versions are kept, at once
};

}  // namespace ballast::services
