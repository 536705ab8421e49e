# `cpack` in a build folder writes Debian packages: ballast-server, libballast-dev, and ballast-dashboards and ballast-alerts where
# the tree has their files. Dependencies on libraries are those that the programs link.
set(packages server dev)
file(GLOB boards ${PROJECT_SOURCE_DIR}/deploy/grafana/boards/*.json)
if(boards)
  list(APPEND packages dashboards)
  install(FILES ${boards} DESTINATION share/ballast/grafana COMPONENT dashboards)
endif()
file(GLOB rules ${PROJECT_SOURCE_DIR}/deploy/prometheus/*.rules.yml)
if(rules)
  list(APPEND packages alerts)
  install(FILES ${rules} DESTINATION share/ballast/prometheus COMPONENT alerts)
endif()

set(CPACK_GENERATOR DEB)
set(CPACK_COMPONENTS_ALL ${packages})
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(BALLAST_MAINTAINER "The Ballast authors <ballast@packages.invalid>" CACHE STRING "Maintainer that Debian packages name")
set(CPACK_PACKAGE_CONTACT ${BALLAST_MAINTAINER})
set(CPACK_DEBIAN_PACKAGE_MAINTAINER ${CPACK_PACKAGE_CONTACT})
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
# Copyright, changelog and configuration go where Debian wants them.
set(CPACK_PROJECT_SOURCE_DIR ${PROJECT_SOURCE_DIR})
set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/deploy/packaging/debian_layout.cmake)

# ballast_deb(<component> <package> <section> <summary> <description>)
function(ballast_deb component package section summary description)
  string(TOUPPER ${component} upper)
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${package} PARENT_SCOPE)
  set(CPACK_DEBIAN_${upper}_PACKAGE_SECTION ${section} PARENT_SCOPE)
  set(CPACK_COMPONENT_${upper}_DESCRIPTION "${summary}\n${description}" PARENT_SCOPE)
endfunction()
ballast_deb(server ballast-server admin "state server for training large models"
"Holds fp32 master weights, optimizer moments and working parameters of
training jobs in CPU memory and on NVMe, and runs the optimizer there. With
ballastd, the systemd unit, and ballastctl for operators.")
ballast_deb(dev libballast-dev libdevel "client library of Ballast's state servers, for C++ trainers"
"Headers, static libraries and a CMake package, found by
find_package(Ballast), for trainers whose state lives on ballast-server.")
ballast_deb(dashboards ballast-dashboards admin "Grafana dashboards of Ballast's state servers"
"Dashboards as JSON files, for Grafana's file provisioning.")
ballast_deb(alerts ballast-alerts admin "Prometheus alerts of Ballast's state servers"
"Rule files for Prometheus, of alerts about state servers and their jobs.")
set(CPACK_DEBIAN_SERVER_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_SERVER_PACKAGE_DEPENDS "passwd")
set(CPACK_DEBIAN_SERVER_PACKAGE_CONTROL_EXTRA
  "${PROJECT_SOURCE_DIR}/deploy/packaging/conffiles;${PROJECT_SOURCE_DIR}/deploy/packaging/postinst;${PROJECT_SOURCE_DIR}/deploy/packaging/prerm;${PROJECT_SOURCE_DIR}/deploy/packaging/postrm")
# What BallastConfig.cmake looks for.
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS
  "libgrpc++-dev, protobuf-compiler-grpc, libprotobuf-dev, libabsl-dev, libhwy-dev, libgloo-dev, libssl-dev, libisal-dev, pkg-config")
foreach(component dashboards alerts)
  string(TOUPPER ${component} upper)
  set(CPACK_DEBIAN_${upper}_PACKAGE_ARCHITECTURE all)
endforeach()
include(CPack)
