# What a consumer gets: find_package(Ballast) with Ballast::client, Ballast::kernels and all that they stand on.
include(CMakePackageConfigHelpers)

set(installed ballast_proto ballast_proto_grpc ballast_base ballast_model ballast_registry ballast_kernels ballast_collective ballast_client)
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Ballast)
# Component dev is libballast-dev, component server is ballast-server (BallastPackaging).
set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME dev)
install(TARGETS ${installed} EXPORT BallastTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS ballastd ballastctl RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT server)
install(FILES ${PROJECT_SOURCE_DIR}/deploy/systemd/ballastd.service DESTINATION lib/systemd/system COMPONENT server)
install(FILES ${PROJECT_SOURCE_DIR}/deploy/systemd/ballast.sysusers DESTINATION lib/sysusers.d RENAME ballast.conf COMPONENT server)
install(FILES ${PROJECT_SOURCE_DIR}/deploy/systemd/ballastd.yaml DESTINATION ${CMAKE_INSTALL_SYSCONFDIR}/ballast COMPONENT server)
foreach(room base model)
  file(GLOB headers ${PROJECT_SOURCE_DIR}/proto/${room}/*.h)
  install(FILES ${headers} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ballast/proto/${room})
endforeach()
# Headers of proto/base were in proto/model: until 0.2.0 an include of the old path finds the new one.
foreach(header access address broken_pipe byte_sizes descriptor lent_memory listening_sockets memory_socket mutexes shared_message status text_file threads tls_probe)
  file(WRITE ${PROJECT_BINARY_DIR}/forwarding/${header}.h
    "#pragma once\n\n#include \"ballast/proto/base/${header}.h\"  // has moved\n")
  install(FILES ${PROJECT_BINARY_DIR}/forwarding/${header}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ballast/proto/model)
endforeach()
# The public headers; the others of these folders are their inside.
foreach(header float_formats kernels optimizer self_test thread_pool)
  install(FILES ${PROJECT_SOURCE_DIR}/kernels/${header}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ballast/kernels)
endforeach()
foreach(header grpc_transport loans reader reads session session_types steps tensors transport versions)
  install(FILES ${PROJECT_SOURCE_DIR}/client/${header}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ballast/client)
endforeach()
foreach(header collective file_rendezvous gloo_collective gradient_tree loopback_collective rank_lock rendezvous)
  install(FILES ${PROJECT_SOURCE_DIR}/client/collective/${header}.h
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ballast/client/collective)
endforeach()
install(DIRECTORY ${PROJECT_BINARY_DIR}/gen/ballast/v1 DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ballast FILES_MATCHING PATTERN "*.h")

install(EXPORT BallastTargets NAMESPACE Ballast:: DESTINATION ${config_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/deploy/cmake/BallastConfig.cmake.in
  ${PROJECT_BINARY_DIR}/BallastConfig.cmake INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/BallastConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/BallastConfig.cmake ${PROJECT_BINARY_DIR}/BallastConfigVersion.cmake DESTINATION ${config_dir})
