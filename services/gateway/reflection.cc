#include "ballast/services/gateway/reflection.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/gateway/status_codec.h"
#include "ballast/v1/reflection.pb.h"

namespace ballast::services {
namespace {

using google::protobuf::DescriptorPool;
using google::protobuf::FileDescriptor;

constexpr size_t kQuestionBytesMax = 4096;

// The file and those that it imports, each once.
void AddFiles(const FileDescriptor* file, std::set<std::string>* known, v1::ReflectionFiles* out) {
  if (!known->insert(file->name()).second) return;
  google::protobuf::FileDescriptorProto proto;
  file->CopyTo(&proto);
  out->add_file_descriptor_proto(proto.SerializeAsString());
  for (int i = 0; i < file->dependency_count(); ++i) AddFiles(file->dependency(i), known, out);
}

v1::ReflectionResponse AnswerTo(const v1::ReflectionRequest& question) {
  v1::ReflectionResponse answer;
  *answer.mutable_original_request() = question;
  if (question.has_list_services()) {
    for (const char* name : {"ballast.v1.StateService", "ballast.v1.AdminService", "grpc.health.v1.Health"}) {
      answer.mutable_list_services_response()->add_service()->set_name(name);
    }
    return answer;
  }
  const DescriptorPool* const pool = DescriptorPool::generated_pool();
  const FileDescriptor* const file = question.has_file_by_filename()
                                         ? pool->FindFileByName(question.file_by_filename())
                                         : pool->FindFileContainingSymbol(question.file_containing_symbol());
  if (file == nullptr) {
    answer.mutable_error_response()->set_error_code(grpc::StatusCode::NOT_FOUND);
    answer.mutable_error_response()->set_error_message("this server has no such file or symbol");
    return answer;
  }
  std::set<std::string> known;
  AddFiles(file, &known, answer.mutable_file_descriptor_response());
  return answer;
}

}  // namespace

// Reads a question, answers it, and reads the next.
class Reflection::Stream final : public grpc::ServerGenericBidiReactor {
 public:
  explicit Stream(std::atomic<int>* streams) : streams_(streams) {
    if (streams_->fetch_add(1) >= kStreamsMax) {
      Finish(ToGrpc(model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                                 absl::StrCat("at most ", kStreamsMax, " callers may ask for reflection at a time"))));
    } else {
      StartRead(&question_);
    }
  }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    v1::ReflectionRequest question;
    if (question_.Length() > kQuestionBytesMax ||
        !grpc::SerializationTraits<v1::ReflectionRequest>::Deserialize(&question_, &question).ok()) {
      return Finish(ToGrpc(model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                                        "expected a ServerReflectionRequest of at most 4096 bytes")));
    }
    bool own = false;
    grpc::SerializationTraits<v1::ReflectionResponse>::Serialize(AnswerTo(question), &answer_, &own);
    StartWrite(&answer_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::CANCELLED);
    question_.Clear();
    StartRead(&question_);
  }
  void OnDone() override {
    streams_->fetch_sub(1);
    delete this;
  }

  std::atomic<int>* const streams_;
  grpc::ByteBuffer question_, answer_;
};

bool Reflection::Has(const std::string& path) {
  return path == "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo" ||
         path == "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
}

grpc::ServerGenericBidiReactor* Reflection::MakeStream(const grpc::CallbackServerContext& context) {
  class Refusal final : public grpc::ServerGenericBidiReactor {
   public:
    explicit Refusal(const absl::Status& status) { Finish(ToGrpc(status)); }
    void OnDone() override { delete this; }
  };
  const absl::StatusOr<Visitor> visitor = gate_->Know(context, Call::kIdentify);
  if (!visitor.ok()) return new Refusal(visitor.status());
  return new Stream(&streams_);
}

}  // namespace ballast::services
